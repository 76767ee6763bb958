#!/bin/bash
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=1
srun convoke check --failed-hosts=failed digits
[ -s failed ] && exclude=--exclude=./failed
srun --nodes=2 --ntasks=2 $exclude convoke --nproc-per-node=2 digits --epochs 2
