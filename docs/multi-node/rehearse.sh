#!/bin/sh
# Two nodes with two ranks each, played on this machine, on its CPU.
exec phalanx run --local-nodes 2 --nproc-per-node 2 --gpus none "$(dirname "$0")/train.py"
