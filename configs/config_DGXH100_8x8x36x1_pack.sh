#!/usr/bin/env bash
# DGX H100: 8 nodes of 8 GPUs, 36 packed rows per GPU, global batch 4,608 sequences.
# Hyper-parameters: NVIDIA, v3.1.
# Warm-up is a constant rate for 330 steps; then the decay continues as if from step 0, so the rate drops by half.
if [ -z "${BASH_VERSION:-}" ] || shopt -qo posix; then echo 'this config is for bash: start bash, then source it' >&2 && return 2; fi
# shellcheck source=configs/begin.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/begin.sh"
export DGXNNODES=8 DGXNGPU=8
export PACKED=1 PACKING_FACTOR=2 BATCHSIZE=36 GRADIENT_STEPS=1 EXCHANGE_GROUP=1
export LR=0.00301 MAX_STEPS=740 WARMUP_STEPS=200330 START_WARMUP_STEP=-200000
export OPT_LAMB_BETA_1=0.6 OPT_LAMB_BETA_2=0.7 WEIGHT_DECAY_RATE=0.1
export CLIP=before INIT_LOSS_SCALE=1024
export MAX_SAMPLES_TERMINATION=4500000 EVAL_ITER_START_SAMPLES=200000 EVAL_ITER_SAMPLES=200000
export WALLTIME_RUNANDTIME=6
# shellcheck source=configs/common.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"
