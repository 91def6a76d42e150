#!/usr/bin/env bash
# Prints all configs as a table.
set -euo pipefail
readonly ROW='%-44s %5s %5s  %-17s %6s %12s %7s  %s\n' # column(1) is a package of its own on Debian
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.."

# Of a config, in an environment of its own.
if [[ ${1:-} ]]; then
  # shellcheck source=/dev/null
  source "$1"
  batch=$((DGXNNODES * DGXNGPU * BATCHSIZE * GRADIENT_STEPS * PACKING_FACTOR))
  # shellcheck disable=SC2059 # one format for all rows
  printf "$ROW" "$DGXSYSTEM" "$DGXNNODES" "$DGXNGPU" "$BATCHSIZE x $GRADIENT_STEPS $( ((PACKED)) || echo un)packed" \
    "$batch" "$(printf '%.6g' "$LR")" "$MAX_STEPS" "${SUBMISSION_DIVISION:-closed}"
  exit
fi
# shellcheck disable=SC2059
printf "$ROW" config nodes GPUs 'rows per GPU' batch LR steps division
for config in configs/config_*.sh; do env -i "PATH=$PATH" "${BASH_SOURCE[0]}" "$config"; done
