#!/bin/bash
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=1
srun convoke check --failed-hosts=failed digits
srun --nodes=2 --ntasks=2 --exclude=./failed convoke --nproc-per-node=2 digits --epochs 2
