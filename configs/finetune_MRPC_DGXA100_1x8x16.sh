#!/usr/bin/env bash
# MRPC on BERT-large, the recipe for 8 A100 (NVIDIA DeepLearningExamples): published accuracy 86.00 +- 1.2 (10 seeds).
if [ -z "${BASH_VERSION:-}" ] || shopt -qo posix; then echo 'this config is for bash: start bash, then source it' >&2 && return 2; fi
# shellcheck source=configs/begin.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/begin.sh"
export RANK_MODULE=finetune TASK=MRPC SEEDS=1,2,3,4,5,6,7,8,9,10 DATA=${DATADIR:-/data/bert}/MRPC
export DGXNNODES=1 DGXNGPU=8 BATCHSIZE=16 GRADIENT_STEPS=1 MAX_SEQ_LENGTH=128
# No clipping in these recipes: this norm is never reached.
export LR=1.8e-5 WARMUP_PROPORTION=0.3 EPOCHS=3 MAX_GRAD_NORM=1e30
export LR_SCHEDULE=linear OPTIMIZER=bertadam
export WALLTIME_RUNANDTIME=40
# shellcheck source=configs/common.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"
