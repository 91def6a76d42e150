#!/usr/bin/env bash
# BERT-5B on 8 H100 of one node: 32 sequences of 128 tokens per GPU, 48 times a step.
# Global batch 12,288 sequences. Hyper-parameters: Habana's (large_model.sh). Speed not measured.
if [ -z "${BASH_VERSION:-}" ] || shopt -qo posix; then echo 'this config is for bash: start bash, then source it' >&2 && return 2; fi
# shellcheck source=configs/begin.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/begin.sh"
export DGXNNODES=1 DGXNGPU=8 BATCHSIZE=32 GRADIENT_STEPS=48
export BERT_CONFIG=bert_5b.json MAX_STEPS=75000 CHECKPOINT_EVERY_STEPS=120 CHECKPOINT_SHARDS=1 LOG_EVERY_STEPS=1 RECOMPUTE_LAYERS=1
# shellcheck source=configs/large_model.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/large_model.sh"
# shellcheck source=configs/common.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"
