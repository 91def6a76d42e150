#!/usr/bin/env bash
# DGX H100: 434 nodes of 8 GPUs, 2 packed rows per GPU, global batch 13,888 sequences.
# Hyper-parameters: NVIDIA, v3.1 to v4.1.
if [ -z "${BASH_VERSION:-}" ] || shopt -qo posix; then echo 'this config is for bash: start bash, then source it' >&2 && return 2; fi
# shellcheck source=configs/begin.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/begin.sh"
export DGXNNODES=434 DGXNGPU=8
export PACKED=1 PACKING_FACTOR=2 BATCHSIZE=2 GRADIENT_STEPS=1 EXCHANGE_GROUP=1
export LR=0.0036 MAX_STEPS=480 WARMUP_STEPS=290 START_WARMUP_STEP=-100
export OPT_LAMB_BETA_1=0.75 OPT_LAMB_BETA_2=0.9 WEIGHT_DECAY_RATE=0.0166629
export CLIP=after INIT_LOSS_SCALE=1024
export MAX_SAMPLES_TERMINATION=12000000 EVAL_ITER_START_SAMPLES=300000 EVAL_ITER_SAMPLES=300000
export WALLTIME_RUNANDTIME=5
# shellcheck source=configs/common.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"
