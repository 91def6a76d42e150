#!/usr/bin/env bash
# Sets the clocks of this node's GPUs, as root or by sudo. Usage: clocks.sh set | reset
# set locks the SM clocks to GPU_CLOCKS (MHz: one number, or LOWEST,HIGHEST); reset returns them to the driver.
set -uo pipefail
readonly CLOCKS=${GPU_CLOCKS:?}

# nvidia-smi hangs with a broken driver.
clocks::smi() { timeout -k 5 60 "$@" 2>&1 </dev/null; }

# nvidia-smi exits with 0 even if it set nothing ("not supported ... treating as warning"), so its messages are counted.
clocks::ask() { clocks::smi nvidia-smi "$@" || clocks::smi sudo -n nvidia-smi "$@"; }

clocks::reset() { clocks::ask --reset-gpu-clocks >/dev/null; }

clocks::set() {
  local output count
  count=$(clocks::smi nvidia-smi --query-gpu=index --format=csv,noheader | grep -c '^[0-9]')
  output=$(clocks::ask --lock-gpu-clocks="$CLOCKS")
  if ((count == 0 || $(grep -c '^GPU clocks set to' <<<"$output") < count)); then
    clocks::reset
    echo "${SLURMD_NODENAME:-$(uname -n)}: $(clocks::error "$output")" >&2
    return 1
  fi
}

clocks::error() {
  grep -v '^GPU clocks set to\|^All done\|^Treating as\|^[[:space:]]*$' <<<"$1" | grep . | head -n 1 | grep . || echo 'nvidia-smi sees no GPU'
}

"clocks::${1:?set or reset}"
