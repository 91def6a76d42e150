#!/usr/bin/env bash
# NVTX_FLAG=1: runs rank 0 under Nsight Systems, with its report beside the trial's log.
# Sourced by run_and_time.sh.

# Sets the array profile, the prefix of the trainer's command.
profile::command() {
  local -r rank=$1
  profile=()
  if [[ ${NVTX_FLAG:-0} == 0 || $rank != 0 ]]; then return 0; fi
  if ! command -v nsys >/dev/null; then
    echo "run: error: NVTX_FLAG=1, but nsys is not on PATH here: install Nsight Systems, or set NVTX_FLAG=0" >&2
    exit 2
  fi
  profile=(nsys profile "--trace=cuda,nvtx" --sample=none --cpuctxsw=none --force-overwrite=true
    --output="${RUN_DIR:-.}/profile_${TRIAL:-0}_rank$rank")
  # Newer versions name PyTorch's operations themselves.
  if grep -q -- --pytorch <<<"$(nsys profile --help 2>&1)"; then profile+=(--pytorch=autograd-nvtx); fi
}
