#!/usr/bin/env bash
# P8000, 8 x H100 80 GB: 1 node, 8 GPUs, 48 packed rows a GPU, global batch 768 sequences. Closed division.
export DGXNNODES=1 DGXNGPU=8
export PACKED=1 PACKING_FACTOR=2 BATCHSIZE=48 GRADIENT_STEPS=1
export LR=0.00096 MAX_STEPS=3680 WARMUP_STEPS=0 START_WARMUP_STEP=0
export OPT_LAMB_BETA_1=0.60466 OPT_LAMB_BETA_2=0.85437 WEIGHT_DECAY_RATE=0.1
export INIT_LOSS_SCALE=1024
export EVAL_ITER_START_SAMPLES=150000 EVAL_ITER_SAMPLES=150000
export WALLTIME_RUNANDTIME=12
# shellcheck source=configs/common.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"
