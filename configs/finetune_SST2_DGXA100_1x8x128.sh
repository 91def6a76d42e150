#!/usr/bin/env bash
# SST-2 on BERT-large, the recipe for 8 A100 (NVIDIA DeepLearningExamples): published accuracy 91.74 +- 0.45.
if [ -z "${BASH_VERSION:-}" ] || shopt -qo posix; then echo 'this config is for bash: start bash, then source it' >&2 && return 2; fi
# shellcheck source=configs/begin.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/begin.sh"
export RANK_MODULE=finetune TASK=SST-2 DATA=${DATADIR:-/data/bert}/SST-2
export DGXNNODES=1 DGXNGPU=8 BATCHSIZE=128 GRADIENT_STEPS=1 MAX_SEQ_LENGTH=128
# No clipping in these recipes: this norm is never reached.
export LR=1e-5 WARMUP_PROPORTION=0.1 EPOCHS=3 MAX_GRAD_NORM=1e30
export LR_SCHEDULE=linear OPTIMIZER=bertadam
export WALLTIME_RUNANDTIME=20
# shellcheck source=configs/common.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"
