#!/usr/bin/env bash
# Hyper-parameters of a global batch of 768 packed sequences, as NVIDIA published them for 8 GPUs (v2.1 to v5.0).
# Exports only; sourced by the configs of that batch, for any number of GPUs.
export PACKED=1 PACKING_FACTOR=2 EXCHANGE_GROUP=1
export LR=0.00096 MAX_STEPS=3680 WARMUP_STEPS=0 START_WARMUP_STEP=0
export OPT_LAMB_BETA_1=0.60466 OPT_LAMB_BETA_2=0.85437 WEIGHT_DECAY_RATE=0.1
# Each GPU clips its own gradient: apex's order, for which these values were tuned.
export CLIP=before INIT_LOSS_SCALE=1024
export MAX_SAMPLES_TERMINATION=4500000 EVAL_ITER_START_SAMPLES=150000 EVAL_ITER_SAMPLES=150000
