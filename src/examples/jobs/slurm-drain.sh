#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@120
trap 'convoke drain logs' USR1
srun convoke --log-dir=logs --nproc-per-node=1 digits --epochs 3000 --print-every 1000 --checkpoint state &
until wait; [ -z "$(jobs -r)" ]; do :; done
