#!/usr/bin/env bash
# make pretrain-demo: both phases of a small BERT on 2 processes of any machine, at 32 and at 128 tokens, a quarter as
# phase 1 is of phase 2 in the large recipes. A step has 4,096 tokens in both.
# shellcheck source=configs/begin.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/begin.sh"
export DGXNNODES=1 DGXNGPU=2 DEVICE=auto SEED=1
export SUBMISSION_DIVISION=open INIT_CHECKPOINT='' CHECK_COMPLIANCE=0 CLEAR_CACHES=0
export PACKED=1 PACKING_FACTOR=1 GRADIENT_STEPS=1 EVAL_ITER_SAMPLES=0
export OPTIMIZER=lamb CLIP=after OPT_LAMB_BETA_1=0.9 OPT_LAMB_BETA_2=0.98 WEIGHT_DECAY_RATE=0.01 LR_SCHEDULE=dle
export CHECKPOINT_EVERY_STEPS=100 CHECKPOINT_KEEP=1 LOG_EVERY_STEPS=50
if [[ ${PHASE:-1} == 1 ]]; then
  export MAX_SEQ_LENGTH=32 BATCHSIZE=64 LR=0.02 MAX_STEPS=600 WARMUP_PROPORTION=0.2
else
  export MAX_SEQ_LENGTH=128 BATCHSIZE=16 LR=0.01 MAX_STEPS=200 WARMUP_PROPORTION=0.1
fi
export DATADIR_PHASE2_PACKED=${DATADIR:-demo/pretraining}/$MAX_SEQ_LENGTH/packed_data
export CHECKPOINTDIR_PHASE1=${DATADIR:-demo/pretraining}/$MAX_SEQ_LENGTH/phase1
export WALLTIME_RUNANDTIME=10
# shellcheck source=configs/common.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"
