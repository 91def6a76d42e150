#!/usr/bin/env bash
# BERT-large from scratch, the recipe of NVIDIA DeepLearningExamples, on 8 H100 of one node: PHASE=1 at 128 tokens with a
# global batch of 65,536 sequences, then PHASE=2 at 512 tokens with 32,768. For run_pretraining.sh, which hands over.
# The data of both phases, made of one text by prepare_data.sh --phases, are in DATADIR/128 and DATADIR/512.
# shellcheck source=configs/begin.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/begin.sh"
export DGXNNODES=1 DGXNGPU=8
export SUBMISSION_DIVISION=open INIT_CHECKPOINT='' CHECK_COMPLIANCE=0 CLEAR_CACHES=0
export PACKED=0 PACKING_FACTOR=1 EVAL_ITER_SAMPLES=0
export OPTIMIZER=lamb CLIP=after OPT_LAMB_BETA_1=0.9 OPT_LAMB_BETA_2=0.999 WEIGHT_DECAY_RATE=0.01 LR_SCHEDULE=dle
export CHECKPOINT_EVERY_STEPS=200 LOG_EVERY_STEPS=10
if [[ ${PHASE:-1} == 1 ]]; then
  export BATCHSIZE=256 GRADIENT_STEPS=32 LR=6e-3 MAX_STEPS=7038 WARMUP_PROPORTION=0.2843
else
  export BATCHSIZE=32 GRADIENT_STEPS=128 LR=4e-3 MAX_STEPS=1563 WARMUP_PROPORTION=0.128
fi
# shellcheck source=configs/phase_data.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/phase_data.sh"
export WALLTIME_RUNANDTIME=10080
# shellcheck source=configs/common.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"
