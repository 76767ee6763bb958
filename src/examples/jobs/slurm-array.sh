#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --array=1-2
srun convoke --nproc-per-node=2 digits --epochs 1 --seed $SLURM_ARRAY_TASK_ID
