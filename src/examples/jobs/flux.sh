#!/bin/sh
#flux: -N2
convoke --hosts=$(flux hostlist) --nproc-per-node=2 digits --epochs 2
