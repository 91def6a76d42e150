#!/usr/bin/env bash
# Submits a job, for --slurm of the run scripts. Sourced by them.

# Arguments: those of sbatch except the number of nodes. Output and exit status are sbatch's; a failure is reported in one line,
# the last one.
submit::job() {
  local output status=0
  command -v sbatch >/dev/null || log::die '--slurm: no sbatch here'
  { output=$(sbatch -N "$((${DGXNNODES:-1} + ${SPARE_NODES:-0}))" "$@" 2>&1 >&3) || status=$?; } 3>&1
  [[ $output != *'sbatch: '@(error|fatal)': '* || $status == 0 ]] ||
    log::die "--slurm: no job was submitted: ${output##*: }; launch/doctor.sh slurm tells more"
  if [[ $output ]]; then echo "$output" >&2; fi
  return "$status"
}
