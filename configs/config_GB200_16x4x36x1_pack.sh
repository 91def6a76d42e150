#!/usr/bin/env bash
# GB200 NVL72: 16 nodes of 4 GPUs, 36 packed rows per GPU, global batch 4,608 sequences.
# Hyper-parameters: NVIDIA, v5.0.
# START_WARMUP_STEP is further back than WARMUP_STEPS: no warm-up, decay from step 1.
if [ -z "${BASH_VERSION:-}" ] || shopt -qo posix; then echo 'this config is for bash: start bash, then source it' >&2 && return 2; fi
# shellcheck source=configs/begin.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/begin.sh"
export DGXNNODES=16 DGXNGPU=4
export PACKED=1 PACKING_FACTOR=2 BATCHSIZE=36 GRADIENT_STEPS=1 EXCHANGE_GROUP=1
export LR=0.00258 MAX_STEPS=780 WARMUP_STEPS=170200 START_WARMUP_STEP=-200000
export OPT_LAMB_BETA_1=0.7206 OPT_LAMB_BETA_2=0.78921 WEIGHT_DECAY_RATE=0.1
export CLIP=before INIT_LOSS_SCALE=1024
export MAX_SAMPLES_TERMINATION=4500000 EVAL_ITER_START_SAMPLES=200000 EVAL_ITER_SAMPLES=200000
export WALLTIME_RUNANDTIME=6
# shellcheck source=configs/common.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"
