#!/usr/bin/env bash
# The recipe of NVIDIA DeepLearningExamples for BERT from scratch: PHASE=1 at 128 tokens with a global batch of 65,536
# sequences, then PHASE=2 at 512 tokens with 32,768, on DGXNNODES nodes (1) of DGXNGPU GPUs (8), which you may export.
# Exports only; sourced by configs/pretrain_*.sh, which export PHASE1_BATCHSIZE, the micro-batch of a GPU at 128 tokens.
# PACKED=1, the default, packs sequences into rows (two per row of 512 tokens on average); PACKED=0 gives exactly the batch.
export DGXNNODES=${DGXNNODES:-1} DGXNGPU=${DGXNGPU:-8} PACKED=${PACKED:-1} PACKING_FACTOR=1
export SUBMISSION_DIVISION=open INIT_CHECKPOINT='' CHECK_COMPLIANCE=0 CLEAR_CACHES=0 EVAL_ITER_SAMPLES=0
export OPTIMIZER=lamb CLIP=after OPT_LAMB_BETA_1=0.9 OPT_LAMB_BETA_2=0.999 WEIGHT_DECAY_RATE=0.01 LR_SCHEDULE=dle
export CHECKPOINT_EVERY_STEPS=200 LOG_EVERY_STEPS=10
if [[ ${PHASE:-1} == 1 ]]; then
  export BATCHSIZE=$PHASE1_BATCHSIZE LR=6e-3 MAX_STEPS=7038 WARMUP_PROPORTION=0.2843
  share=$((65536 / (DGXNNODES * DGXNGPU)))
else
  export BATCHSIZE=$((PHASE1_BATCHSIZE / 8)) LR=4e-3 MAX_STEPS=1563 WARMUP_PROPORTION=0.128
  case ${PACKED,,} in 1 | true | yes | on) export PACKING_FACTOR=2 ;; esac # the trainer's words
  share=$((32768 / PACKING_FACTOR / (DGXNNODES * DGXNGPU)))
fi
if ((BATCHSIZE > share)); then export BATCHSIZE=$share; fi
export GRADIENT_STEPS=$((share / BATCHSIZE))
unset share PHASE1_BATCHSIZE
# shellcheck source=configs/phase_data.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/phase_data.sh"
export WALLTIME_RUNANDTIME=10080
