#!/usr/bin/env bash
# make pretrain-demo: 6 layers on 2 processes of any machine, masked-LM only, continued from INIT_CHECKPOINT or from scratch.
if [ -z "${BASH_VERSION:-}" ] || shopt -qo posix; then echo 'this config is for bash: start bash, then source it' >&2 && return 2; fi
# shellcheck source=configs/begin.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/begin.sh"
export DGXNNODES=1 DGXNGPU=${DGXNGPU:-2} DEVICE=auto SEED=1 MAX_SEQ_LENGTH=128 LR=5e-4 MAX_STEPS=100 INIT_CHECKPOINT=${INIT_CHECKPOINT-}
export BATCH=16 ROWS=8
# shellcheck source=configs/own_text.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/own_text.sh"
export EVAL_ITER_SAMPLES=$((16 * MAX_STEPS)) CHECKPOINT_EVERY_STEPS=25 CHECKPOINT_KEEP=1 LOG_EVERY_STEPS=25
# shellcheck source=configs/common.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"
