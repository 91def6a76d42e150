#!/usr/bin/env bash
# Sequence length and data of a phase, as `prepare_data.sh --phases` writes them to DATADIR: PHASE=1 at 128 tokens, PHASE=2 at
# 512; shuffled sequences, or packed rows of --packed-data for PACKED=1. Exports only; sourced by configs/pretrain_*.sh.
export MAX_SEQ_LENGTH=$((${PHASE:-1} == 1 ? 128 : 512))
export DATADIR_PHASE2=${DATADIR:-/data/bert}/$MAX_SEQ_LENGTH/hdf5/training
export DATADIR_PHASE2_PACKED=${DATADIR:-/data/bert}/$MAX_SEQ_LENGTH/packed_data
export EVALDIR=${DATADIR:-/data/bert}/$MAX_SEQ_LENGTH/eval CHECKPOINTDIR_PHASE1=${DATADIR:-/data/bert}/$MAX_SEQ_LENGTH/phase1
