#!/usr/bin/env bash
# Continues INIT_CHECKPOINT, a folder in the Hub's layout, on text prepared with its vocab.txt: 256 rows of 512 tokens per step, 1e-4,
# linear with 6% warm-up, as Gururangan et al. 2020 ("Don't Stop Pretraining": ADAPTIVE_PRETRAINING.md of
# allenai/dont-stop-pretraining, and the appendix) use for task texts; on billions of words of a domain they take 12,500 steps of
# 2,048 rows at 5e-4. The 5,000 steps are our choice.
# Exports only; sourced by configs/pretrain_continue_*.sh.
export INIT_CHECKPOINT=${INIT_CHECKPOINT:?is not set: export the folder of the model to continue} MAX_SEQ_LENGTH=512 LR=1e-4 MAX_STEPS=5000
export BATCH=256
# shellcheck source=configs/own_text.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/own_text.sh"
