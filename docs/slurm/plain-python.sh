#!/bin/bash
# Without phalanx run: init_world() reads the rank from the step.
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --time=10
##SBATCH --gpus-per-task=1
srun --kill-on-bad-exit=1 python train.py
