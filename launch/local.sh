#!/bin/sh
# Trains on this machine, on all of its GPUs, or on one rank where there is none; NPROC says how many instead:
#
#   launch/local.sh recipe=resnet18_cifar10 optim.lr=0.2
#   NPROC=2 launch/local.sh recipe=cnn_digits device=cpu
#
# torchrun's options and its variables (PET_MAX_RESTARTS=3) work too. More: docs/launching.md
set -eu
[ -z "${NPROC:-}" ] || export PET_NPROC_PER_NODE="$NPROC"
exec python -m ddptrain launch "$@"
