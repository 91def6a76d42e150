#!/usr/bin/env bash
# SQuAD 1.1 on BERT-large, the recipe of 2019 for 8 V100 (NVIDIA DeepLearningExamples): published F1 91.08 +- 0.16 (5 seeds).
if [ -z "${BASH_VERSION:-}" ] || shopt -qo posix; then echo 'this config is for bash: start bash, then source it' >&2 && return 2; fi
# shellcheck source=configs/begin.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/begin.sh"
export RANK_MODULE=finetune TASK=squad SQUAD_VERSION=1.1 DATA=${DATADIR:-/data/bert}/squad
export DGXNNODES=1 DGXNGPU=8 BATCHSIZE=4 GRADIENT_STEPS=1 MAX_SEQ_LENGTH=384 PRECISION=fp16
export LR=3e-5 WARMUP_PROPORTION=0.1 EPOCHS=2
export LR_SCHEDULE=linear OPTIMIZER=bertadam
export WALLTIME_RUNANDTIME=60
# shellcheck source=configs/common.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"
