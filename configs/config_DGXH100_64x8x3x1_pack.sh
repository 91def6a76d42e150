#!/usr/bin/env bash
# DGX H100: 64 nodes of 8 GPUs, 3 packed rows per GPU, global batch 3,072 sequences.
# Hyper-parameters: NVIDIA, v3.0.
if [ -z "${BASH_VERSION:-}" ] || shopt -qo posix; then echo 'this config is for bash: start bash, then source it' >&2 && return 2; fi
# shellcheck source=configs/begin.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/begin.sh"
export DGXNNODES=64 DGXNGPU=8
export PACKED=1 PACKING_FACTOR=2 BATCHSIZE=3 GRADIENT_STEPS=1 EXCHANGE_GROUP=1
export LR=0.002 MAX_STEPS=1024 WARMUP_STEPS=10000 START_WARMUP_STEP=-9500
export OPT_LAMB_BETA_1=0.62 OPT_LAMB_BETA_2=0.90 WEIGHT_DECAY_RATE=0.01
export CLIP=after INIT_LOSS_SCALE=1024
export MAX_SAMPLES_TERMINATION=4500000 EVAL_ITER_START_SAMPLES=175000 EVAL_ITER_SAMPLES=175000
export WALLTIME_RUNANDTIME=6
# shellcheck source=configs/common.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"
