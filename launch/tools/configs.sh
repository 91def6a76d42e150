#!/usr/bin/env bash
# Prints all configs as a table.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.."

# Of a config, in an environment of its own.
if [[ ${1:-} ]]; then
  # shellcheck source=/dev/null
  source "$1"
  batch=$((DGXNNODES * DGXNGPU * BATCHSIZE * GRADIENT_STEPS * PACKING_FACTOR))
  printf '%s|%s|%s|%s x %s %spacked|%s|%.6g|%s|%s\n' "$DGXSYSTEM" "$DGXNNODES" "$DGXNGPU" "$BATCHSIZE" "$GRADIENT_STEPS" \
    "$( ((PACKED)) || echo un)" "$batch" "$LR" "$MAX_STEPS" "${SUBMISSION_DIVISION:-closed}"
  exit
fi
{
  echo 'config|nodes|GPUs|rows per GPU|batch|LR|steps|division'
  for config in configs/config_*.sh; do env -i "PATH=$PATH" "${BASH_SOURCE[0]}" "$config"; done
} | column -t -s '|'
