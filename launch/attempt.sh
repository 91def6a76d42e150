#!/usr/bin/env bash
# One attempt at a run, from its containers to their removal, on given nodes. The supervisor starts it, and may start it again with
# other nodes. Usage: attempt.sh PLATFORM WORK [NODE...], the work trial or certify. Reports by records (run/record.sh).
set -euo pipefail
readonly PLATFORM=$1 WORK=$2
# shellcheck disable=SC2034 # for the platform
declare -a nodes=("${@:3}")
# shellcheck source=launch/load.sh
source "${BASH_SOURCE[0]%/*}/load.sh" run/trial container/container "$PLATFORM/runner"
if [[ $WORK == trial ]]; then
  variables::trainer
  trainer::defaults
fi
"$WORK::main"
