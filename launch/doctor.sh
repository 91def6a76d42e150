#!/usr/bin/env bash
# Is this site ready for the run scripts? Prints pass, warn, fail or skip for each check, and the command that fixes a failure.
#   source env.sh; source configs/config_<SYSTEM>_....sh; launch/doctor.sh
# Without a config, checks that need one are skipped.
# usage: doctor.sh [help] [slurm] [container] [ssh] [machine] [gpu] [data] [verify]     default: all except verify
# On the compute nodes: srun --nodes=2 --ntasks-per-node=1 launch/doctor.sh machine gpu data
# Exit status: 0 if nothing failed, 1 if something did, 2 for wrong usage.
set -uo pipefail
# shellcheck source=launch/load.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/load.sh" run/log run/variables run/answers container/container ssh/hosts ssh/ssh slurm/job
hosts=()

# The run scripts' own checks, for doctor.py (--check NAME), which end with their error. The last line is what passes, or before an error
# what cures it.
doctor::settings() {
  if [[ ${DGXSYSTEM:-} && ${DGXNGPU:-} ]]; then variables::load; else variables::check_names; fi
  echo 'no exported name looks misspelt'
}

doctor::ssh() {
  hosts::load
  if [[ ${DGXSYSTEM:-} && ${DGXNGPU:-} ]]; then hosts::check; fi
  container::choose ssh
  ssh::command
  ssh::check
  echo "${hosts[*]}: reachable, with the repository"
}

# Starts a container: here, or with pyxis on this node of a job or any free one.
doctor::container() {
  export DGXNNODES=1 ATTEMPT_NAME=''
  # shellcheck disable=SC2329 # the runtime's file calls it
  runner::everywhere() { "$@"; }
  local platform
  local -a how=(--immediate=60)
  if [[ ${SLURM_JOB_ID:-} ]]; then
    slurm::forget_options
    how=(--overlap ${SLURMD_NODENAME:+"--nodelist=$SLURMD_NODENAME"})
  fi
  # shellcheck disable=SC2034 # the runtime's file reads it
  srun=(srun --nodes=1 "${how[@]}")
  for platform in $(command -v sbatch >/dev/null && echo slurm) local; do
    if (container::choose "$platform") 2>/dev/null; then break; fi
  done
  container::load "$platform"
  container::check
  echo "${runtime_advice:-}"
  container::create
  # shellcheck disable=SC2154 # answers.sh sets it
  echo "a container of $CONT ran on $(sed -n 's/^answer //p' <<<"$answers_output")"
}

if [[ ${1:-} == --check ]]; then
  "doctor::$2"
  exit
fi
if [[ " $* " =~ ' '(help|--help|-h)' ' ]]; then sed -n '2,/^set /s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" && exit; fi
# shellcheck source=env.sh
if [[ -z ${EVALDIR:-} ]]; then source "$REPO_DIR/env.sh"; fi
exports::follow
CONTAINER_RUNTIME=none python::choose # this machine's; the image is tried by container
if ! reason=$(python::require_host 2>&1); then
  printf ' fail  %-21s %s\n' python3 "${reason#run: error: }"
  exit 1
fi
python::host "$REPO_DIR/launch/doctor.py" "$@"
