#!/usr/bin/env bash
# Submits a job, for --slurm of the run scripts. Sourced by them.

# Arguments: those of sbatch except the number of nodes. Output and exit status are sbatch's; a failure is reported in one line,
# the last one.
submit::job() {
  local said status=0
  command -v sbatch >/dev/null || log::die '--slurm: no sbatch here'
  { said=$(sbatch -N "$((${DGXNNODES:-1} + ${SPARE_NODES:-0}))" "$@" 2>&1 >&3) || status=$?; } 3>&1
  [[ $said != *'sbatch: '@(error|fatal)': '* || $status == 0 ]] ||
    log::die "--slurm: no job was submitted: ${said##*: }; launch/doctor.sh slurm tells more"
  if [[ $said ]]; then echo "$said" >&2; fi
  return "$status"
}
