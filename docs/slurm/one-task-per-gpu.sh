#!/bin/bash
# One task per GPU: each `phalanx run` becomes that rank itself; srun starts them and shows what they print.
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --time=10
##SBATCH --gpus-per-task=1
srun --kill-on-bad-exit=1 phalanx run train.py
