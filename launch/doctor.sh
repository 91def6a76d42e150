#!/usr/bin/env bash
# Is this site ready for the run scripts? Prints pass, warn, fail or skip for each check, and the command that fixes a failure.
#   source env.sh; source configs/config_<SYSTEM>_....sh; launch/doctor.sh
# Without a config, checks that need one are skipped.
# usage: doctor.sh [help] [slurm] [container] [ssh] [machine] [gpu] [data] [verify]     default: all except verify
# On the compute nodes: srun --nodes=2 --ntasks-per-node=1 launch/doctor.sh machine gpu data
# Exit status: 0 if nothing failed, 1 if something did, 2 for wrong usage.
set -uo pipefail
REPO_DIR=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
readonly REPO_DIR GROUPS_ALL=(slurm container ssh machine gpu data)
readonly PROC_SYS=${PROC_SYS:-/proc/sys}
# shellcheck source=launch/load.sh
source "$REPO_DIR/launch/load.sh" run/log run/variables run/answers node/binding container/container ssh/hosts ssh/ssh
# With several nodes at once, each prefixes its lines with its name.
NODE=''
if ((${SLURM_STEP_NUM_TASKS:-1} > 1)); then NODE="${SLURMD_NODENAME:-$(uname -n)}:"; fi
readonly NODE
declare -i failed=0 warned=0
# shellcheck disable=SC2034 # hosts.sh fills it
declare -a hosts=()

# Prints one row. Arguments: pass, warn, fail or skip; name of the check; finding; command that fixes it.
doctor::row() {
  local -r result=$1 check=$2 finding=$3 fix=${4:-}
  local colour='' plain=''
  if [[ -t 1 ]]; then
    plain=$'\e[0m'
    case $result in pass) colour=$'\e[32m' ;; warn) colour=$'\e[33m' ;; fail) colour=$'\e[31m' ;; *) colour=$'\e[2m' ;; esac
  fi
  printf '%s %s%-4s%s  %-21s %s\n' "$NODE" "$colour" "$result" "$plain" "$check" "$finding"
  if [[ $fix ]]; then printf '%s       %-21s -> %s\n' "$NODE" '' "$fix"; fi
  case $result in fail) failed+=1 ;; warn) warned+=1 ;; esac
}

# Runs one of the run scripts' own checks in a subshell, which an error ends; its error becomes the row's finding. Arguments: name
# of the row, finding if it passes, the check.
doctor::run_check() {
  local -r name=$1 fine=$2
  local output
  if output=$("${@:3}" 2>&1 >/dev/null); then
    doctor::row pass "$name" "$fine"
  else
    doctor::row fail "$name" "${output##*run: error: }"
  fi
}

# Is this a compute node, rather than a submit node?
doctor::on_compute_node() { [[ -n ${SLURM_PROCID:-} || -e /dev/nvidiactl ]] || ! command -v sbatch >/dev/null; }

# Free space at a path that may not exist yet, in GB; nothing if not even its root exists.
doctor::free_gb() { df --output=avail -BG -- "$(doctor::existing "$1")" 2>/dev/null | sed -n '2s/[^0-9]//gp'; }

# The folder, or its nearest existing parent.
doctor::existing() {
  local folder=$1
  while [[ ! -e $folder && $folder != . && $folder != / ]]; do folder=$(dirname -- "$folder"); done
  echo "$folder"
}

doctor::has_config() { [[ -n ${DGXSYSTEM:-} && -n ${DGXNGPU:-} ]]; }

# The row of a check that needs a config, if none was sourced.
doctor::needs_config() { doctor::row skip "$1" 'no config was sourced' 'source env.sh; source configs/config_<SYSTEM>_....sh'; }

doctor::main() {
  local group
  local -a chosen=("$@")
  ((${#chosen[@]})) || chosen=("${GROUPS_ALL[@]}")
  if [[ " ${chosen[*]} " == *' help '* || " ${chosen[*]} " == *' --help '* || " ${chosen[*]} " == *' -h '* ]]; then
    sed -n '2,/^set /s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    return
  fi
  for group in "${chosen[@]}"; do
    [[ " ${GROUPS_ALL[*]} verify " == *" $group "* ]] || log::die "$group: expected one of ${GROUPS_ALL[*]} verify"
  done
  CONTAINER_RUNTIME=none python::choose # this machine's; the image is tried by container
  # shellcheck source=env.sh
  if [[ -z ${EVALDIR:-} ]]; then source "$REPO_DIR/env.sh"; fi
  : "${DGXNNODES:=1}"
  printf '%s %s\n' "$NODE" "$(uname -n)${DGXSYSTEM:+, $DGXSYSTEM}"
  doctor::run_check variables 'no exported name looks misspelt' variables::check_names
  # A typo is reported above, once.
  if doctor::has_config; then
    variables::check_names() { :; }
    variables::load
  fi
  for group in "${chosen[@]}"; do
    # shellcheck source=/dev/null
    source "$REPO_DIR/launch/doctor/$([[ $group == verify ]] && echo data || echo "$group").sh"
    "doctor::$group"
  done
  printf '%s %s failed, %s warnings\n' "$NODE" "$failed" "$warned"
  ((failed == 0))
}

doctor::main "$@"
