#!/bin/sh
# Ranks that start again by themselves, on one host or several:
#
#     GPUS=8 sh examples/launchers/torchrun.sh run.yaml
#     GPUS=8 NNODES=4 HEAD=host-0:29500 sh examples/launchers/torchrun.sh run.yaml     # on each host
#
# A rank that dies ends all ranks, and torchrun starts them again from the newest checkpoint. After
# SIGTERM, Ctrl-C or a reboot, the same command continues the run.
set -eu
exec torchrun --nnodes "${NNODES:-1}" --nproc-per-node "${GPUS:-1}" \
  --rdzv-backend c10d --rdzv-endpoint "${HEAD:-127.0.0.1:29500}" --rdzv-id "${JOB:-megatrain}" \
  --max-restarts 3 --shutdown-timeout 600 -m megatrain train "$@" --resume
