#!/bin/sh
#PBS -l select=2:ncpus=2:mpiprocs=2
cd $PBS_O_WORKDIR
convoke --hostfile=$PBS_NODEFILE digits --epochs 2
