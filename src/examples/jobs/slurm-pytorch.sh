#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
srun convoke --nproc-per-node=2 train.py
