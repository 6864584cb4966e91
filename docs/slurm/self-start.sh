#!/bin/bash
# No srun: phalanx run starts itself on all nodes of the job.
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --time=10
##SBATCH --gpus-per-node=4
exec phalanx run train.py
