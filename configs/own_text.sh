#!/usr/bin/env bash
# Common part of the recipes for your own text: masked-LM only, AdamW, one phase, DATADIR as written by prepare_data.sh --nsp 0
# --packed-data. Exports only; sourced by one_day.sh and continued.sh, which export BATCH (rows per step) and ROWS (rows per GPU
# and micro-batch). You choose DGXNNODES (1) and DGXNGPU (1).
export DGXNNODES=${DGXNNODES:-1} DGXNGPU=${DGXNGPU:-1} NUM_PHASES=1 NSP=0 PACKED=1 PACKING_FACTOR=1 MASKING=${MASKING:-dynamic}
export SUBMISSION_DIVISION=open CHECK_COMPLIANCE=0 CLEAR_CACHES=0 NUM_EVAL_EXAMPLES=0 TARGET_MLM_ACCURACY=0
export OPTIMIZER=adamw OPT_ADAM_BETA_1=0.9 OPT_ADAM_BETA_2=0.98 OPT_ADAM_EPSILON=1e-6 OPT_ADAM_WEIGHT_DECAY=0.01
export LR_SCHEDULE=linear WARMUP_PROPORTION=0.06 CHECKPOINT_EVERY_STEPS=500 LOG_EVERY_STEPS=50
share=$((BATCH / (DGXNNODES * DGXNGPU)))
export BATCHSIZE=$((ROWS < share ? ROWS : share))
export EVAL_ITER_SAMPLES=$((500 * BATCH)) # all held-out text, every 500 steps
export GRADIENT_STEPS=$((share / BATCHSIZE))
export DATADIR_PHASE2_PACKED=${DATADIR:-/data/mine}/packed_data EVALDIR=${DATADIR:-/data/mine}/eval
export CHECKPOINTDIR_PHASE1=${DATADIR:-/data/mine}/phase1 WALLTIME_RUNANDTIME=$((60 * 25))
unset share BATCH ROWS
