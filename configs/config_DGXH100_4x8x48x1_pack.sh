#!/usr/bin/env bash
# DGX H100: 4 nodes of 8 GPUs, 48 packed rows per GPU, global batch 3,072 sequences.
# Hyper-parameters: NVIDIA, v2.1.
if [ -z "${BASH_VERSION:-}" ] || shopt -qo posix; then echo 'this config is for bash: start bash, then source it' >&2 && return 2; fi
# shellcheck source=configs/begin.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/begin.sh"
export DGXNNODES=4 DGXNGPU=8
export PACKED=1 PACKING_FACTOR=2 BATCHSIZE=48 GRADIENT_STEPS=1 EXCHANGE_GROUP=1
export LR=0.002711 MAX_STEPS=1040 WARMUP_STEPS=0 START_WARMUP_STEP=0
export OPT_LAMB_BETA_1=0.60466 OPT_LAMB_BETA_2=0.85437 WEIGHT_DECAY_RATE=0.1
export CLIP=before INIT_LOSS_SCALE=1024
export MAX_SAMPLES_TERMINATION=4500000 EVAL_ITER_START_SAMPLES=175000 EVAL_ITER_SAMPLES=175000
export WALLTIME_RUNANDTIME=8
# shellcheck source=configs/common.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"
