#!/bin/bash
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=1
#SBATCH --no-kill
srun --no-kill convoke --nnodes=2:3 --max-restarts=3 digits --epochs 2
