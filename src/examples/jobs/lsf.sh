#!/bin/sh
#BSUB -n 4
#BSUB -R "span[ptile=2]"
convoke --hostfile=$LSB_DJOB_HOSTFILE --rsh=blaunch digits --epochs 2
