#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=2
srun --cpus-per-task=2 convoke --nproc-per-node=2 digits --epochs 2
