#!/usr/bin/env bash
# P8000, 8 x H100 80 GB: 1 node, 8 GPUs, 48 packed rows per GPU, global batch 768 sequences.
if [ -z "${BASH_VERSION:-}" ] || shopt -qo posix; then echo 'this config is for bash: start bash, then source it' >&2 && return 2; fi
# shellcheck source=configs/begin.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/begin.sh"
export DGXNNODES=1 DGXNGPU=8 BATCHSIZE=48 GRADIENT_STEPS=1
export WALLTIME_RUNANDTIME=12
# shellcheck source=configs/global_batch_768.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/global_batch_768.sh"
# shellcheck source=configs/common.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"
