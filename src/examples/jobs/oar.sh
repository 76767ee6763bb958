#!/bin/sh
#OAR -l nodes=2/core=2
convoke --hostfile=$OAR_NODEFILE --rsh=oarsh digits --epochs 2
