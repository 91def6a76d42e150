#!/usr/bin/env bash
# make demo: a small BERT on 2 processes of any machine. Open division, since its target is its own.
export DGXNNODES=1 DGXNGPU=2 DEVICE=auto
export SUBMISSION_DIVISION=open INIT_CHECKPOINT='' CLEAR_CACHES=0
export PACKED=1 PACKING_FACTOR=2 BATCHSIZE=4 GRADIENT_STEPS=1
export LR=0.005 MAX_STEPS=300 WARMUP_PROPORTION=0.1
export OPT_LAMB_BETA_1=0.9 OPT_LAMB_BETA_2=0.999 WEIGHT_DECAY_RATE=0.01
export NUM_EVAL_EXAMPLES=200 TARGET_MLM_ACCURACY=0.1
export EVAL_ITER_START_SAMPLES=800 EVAL_ITER_SAMPLES=800 LOG_EVERY_STEPS=10
export WALLTIME_RUNANDTIME=10
# shellcheck source=configs/common.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"
