#!/usr/bin/env bash
# Prints all configs as a table.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.."

configs::row() { printf '%-50s %7s %5s  %-18s %7s %12s %8s %10s\n' "$@"; }

# Of a config, in an environment of its own.
configs::show() {
  # shellcheck source=/dev/null
  source "$1"
  local kind=unpacked
  if ((PACKED)); then kind=packed; fi
  configs::row "$DGXSYSTEM" "$DGXNNODES" "$DGXNGPU" "$BATCHSIZE x $GRADIENT_STEPS $kind" \
    "$((DGXNNODES * DGXNGPU * BATCHSIZE * GRADIENT_STEPS * PACKING_FACTOR))" "$(printf '%.6g' "$LR")" "$MAX_STEPS" \
    "${SUBMISSION_DIVISION:-closed}"
}

if [[ ${1:-} ]]; then configs::show "$1" && exit; fi
configs::row config nodes GPUs 'rows per GPU' batch LR steps division
for config in configs/config_*.sh; do env -i "PATH=$PATH" "${BASH_SOURCE[0]}" "$config"; done
