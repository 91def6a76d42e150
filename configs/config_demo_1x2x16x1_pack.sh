#!/usr/bin/env bash
# make demo: a small BERT on 2 processes of any machine. Open division, since it has its own target.
if [ -z "${BASH_VERSION:-}" ] || shopt -qo posix; then echo 'this config is for bash: start bash, then source it' >&2 && return 2; fi
# shellcheck source=configs/begin.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/begin.sh"
export DGXNNODES=1 DGXNGPU=2 DEVICE=auto
export SUBMISSION_DIVISION=open INIT_CHECKPOINT='' CLEAR_CACHES=0
export PACKED=1 PACKING_FACTOR=1 BATCHSIZE=16 GRADIENT_STEPS=1 MAX_SEQ_LENGTH=128
export LR=0.01 MAX_STEPS=600
export OPT_LAMB_BETA_1=0.9 OPT_LAMB_BETA_2=0.98 WEIGHT_DECAY_RATE=0.01
export NUM_EVAL_EXAMPLES=500 TARGET_MLM_ACCURACY=0.10
export EVAL_ITER_START_SAMPLES=1600 EVAL_ITER_SAMPLES=1600 LOG_EVERY_STEPS=25
export WALLTIME_RUNANDTIME=10
# shellcheck source=configs/common.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"
