#!/usr/bin/env bash
# From scratch in TRAINING_HOURS (24): 4,096 sequences of 128 tokens a step, linear with 6% warm-up, betas 0.9 and 0.98, as IntelLabs'
# academic-budget-bert for a day of 8 Titan V (README, "best configuration": BERT-large, 1e-3, no clipping). Its model is Pre-LN; of
# ours, Post-LN, the rates are RoBERTa's, LR=6e-4 base, 4e-4 large (Liu et al. 2019, table 9), clipped at 1. JonasGeiping's cramming
# (train/bert-o4), a day of one GPU, has Adam at 1e-3 with 8,192 sequences from 60% of the day on, masks 25%, no dropout, clips at 0.5.
# Exports only; sourced by configs/pretrain_day_*.sh, which export LR.
export INIT_CHECKPOINT='' MAX_SEQ_LENGTH=128
MAX_STEPS=$((3600 * ${TRAINING_HOURS:-24} * RATE * ${DGXNNODES:-1} * ${DGXNGPU:-1} / 4096))
export MAX_STEPS BATCH=4096
# shellcheck source=configs/own_text.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/own_text.sh"
