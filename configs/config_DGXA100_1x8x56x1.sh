#!/usr/bin/env bash
# DGX A100 80 GB: 1 node, 8 GPUs, 56 sequences per GPU, global batch 448 sequences.
# Hyper-parameters: NVIDIA, v1.1 to v2.1, and the reference's at this batch size.
# EXCHANGE_GROUP balances sequence lengths among the GPUs of a step, so that all get the same number of tokens.
if [ -z "${BASH_VERSION:-}" ] || shopt -qo posix; then echo 'this config is for bash: start bash, then source it' >&2 && return 2; fi
# shellcheck source=configs/begin.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/begin.sh"
export DGXNNODES=1 DGXNGPU=8
export PACKED=0 PACKING_FACTOR=1 BATCHSIZE=56 GRADIENT_STEPS=1 EXCHANGE_GROUP=8
export LR=0.000425 MAX_STEPS=6700 WARMUP_STEPS=0 START_WARMUP_STEP=0
export OPT_LAMB_BETA_1=0.9 OPT_LAMB_BETA_2=0.999 WEIGHT_DECAY_RATE=0.01
export CLIP=before INIT_LOSS_SCALE=1024
export MAX_SAMPLES_TERMINATION=4500000 EVAL_ITER_START_SAMPLES=150000 EVAL_ITER_SAMPLES=150000
export WALLTIME_RUNANDTIME=40
# shellcheck source=configs/common.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"
