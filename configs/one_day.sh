#!/usr/bin/env bash
# From scratch in 24 hours: 4,096 sequences of 128 tokens per step, linear with 6% warm-up, betas 0.9 and 0.98, as IntelLabs'
# academic-budget-bert for a day on 8 Titan V (README, "best configuration": BERT-large, 1e-3, no clipping). Their model is Pre-LN; ours
# is Post-LN and uses RoBERTa's rates, LR=6e-4 base, 4e-4 large (Liu et al. 2019, table 9), clipped at 1. For comparison, JonasGeiping's
# cramming (train/bert-o4), a day on one GPU, uses Adam at 1e-3, 8,192 sequences after 60% of the day, 25% masks, no dropout, clips at 0.5.
# Exports only; sourced by configs/pretrain_day_*.sh, which export LR and RATE (rows/s of a GPU, modelled).
export INIT_CHECKPOINT='' MAX_SEQ_LENGTH=128
MAX_STEPS=$((3600 * 24 * RATE * ${DGXNNODES:-1} * ${DGXNGPU:-1} / 4096))
export MAX_STEPS BATCH=4096
unset RATE
# shellcheck source=configs/own_text.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/own_text.sh"
