#!/bin/bash
# One task per node: each is that node's agent, which starts one rank per GPU.
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=2
#SBATCH --time=10
##SBATCH --gpus-per-node=4
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
srun phalanx run train.py
