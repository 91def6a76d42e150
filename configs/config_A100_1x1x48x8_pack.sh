#!/usr/bin/env bash
# A100 80 GB: 1 node, 1 GPU, 48 packed rows per GPU x 8 accumulated, global batch 768 sequences.
# CLIP=before clips every micro-batch of 48 rows by its own norm: the same update as on 8 GPUs.
if [ -z "${BASH_VERSION:-}" ] || shopt -qo posix; then echo 'this config is for bash: start bash, then source it' >&2 && return 2; fi
# shellcheck source=configs/begin.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/begin.sh"
export DGXNNODES=1 DGXNGPU=1 BATCHSIZE=48 GRADIENT_STEPS=8
export WALLTIME_RUNANDTIME=190
# shellcheck source=configs/global_batch_768.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/global_batch_768.sh"
# shellcheck source=configs/common.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"
