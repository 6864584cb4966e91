#!/bin/sh
# On every node: NODE_RANK=0 sh by-hand.sh on the first, NODE_RANK=1 on the second, ...
# NODES is how many there are, FIRST the name or address by which all of them reach node 0.
exec phalanx run --nnodes "${NODES:-2}" --node-rank "$NODE_RANK" --master-addr "$FIRST" --nproc-per-node 2 --gpus none \
    "$(dirname "$0")/train.py"
