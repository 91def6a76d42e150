#!/usr/bin/env bash
# RTX 4090 or another GPU of 24 GB: 1 node, 4 GPUs, 8 packed rows per GPU x 12 accumulated, global batch 768 sequences.
# CLIP=before clips every micro-batch by its own norm: 8 rows are noisier than the 48 of 8 GPUs.
if [ -z "${BASH_VERSION:-}" ] || shopt -qo posix; then echo 'this config is for bash: start bash, then source it' >&2 && return 2; fi
# shellcheck source=configs/begin.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/begin.sh"
export DGXNNODES=1 DGXNGPU=4 BATCHSIZE=8 GRADIENT_STEPS=12
export WALLTIME_RUNANDTIME=100
# shellcheck source=configs/global_batch_768.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/global_batch_768.sh"
# shellcheck source=configs/common.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"
