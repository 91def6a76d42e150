#!/usr/bin/env bash
# How does Slurm end this job, and why? Sourced by run.sub.
# shellcheck disable=SC2034,SC2154 # patience is of ending.sh

# Sets how long the ranks may take to end: KillWait seconds after its first signal Slurm kills this script as well, and the last
# line must be said before. Argument: Slurm's configuration.
slurm::patience() {
  local -r kill_wait=$(sed -n 's/^KillWait *= *\([0-9]*\).*/\1/p' <<<"$1")
  patience=$((${kill_wait:-30} * 2 / 3))
}

# This job as Slurm shows it, in one line. Nothing where the controller is too busy to answer while there is time.
slurm::job() {
  timeout --signal=KILL "$((patience < 18 ? patience / 2 + 1 : 10))" \
    scontrol --oneliner show job "$SLURM_JOB_ID" 2>/dev/null || true
}

# At SIGUSR1: the ranks have the time that is left, ten minutes at most, less what the rest of the end may take.
slurm::time_is_short() {
  local -r end=$(slurm::job | sed -n 's/.* EndTime=\([^ ]*\).*/\1/p')
  local left=0
  if [[ $end == ????-??-??T* ]]; then left=$(($(date -d "$end" +%s) - $(date +%s) - 30)); fi
  if ((left > patience)); then patience=$((left < 600 ? left : 600)); fi
  trial::interrupted USR1 143
}

# Why, in words. Argument: the signal that this script got.
slurm::why() {
  local -r job=$(slurm::job)
  local -r state=$(sed -n 's/.* JobState=\([A-Z_]*\).*/\1/p' <<<"$job") reason=$(sed -n 's/.* Reason=\([^ ]*\).*/\1/p' <<<"$job")
  local -r limit=$(sed -n 's/.* TimeLimit=\([^ ]*\).*/\1/p' <<<"$job") restarts=$(sed -n 's/.* Restarts=\([0-9]*\).*/\1/p' <<<"$job")
  if [[ $1 == USR1 || $state == TIMEOUT || $reason == TimeLimit ]]; then
    echo "the job reached its time limit${limit:+ of $limit}"
  elif ((${restarts:-0} > ${SLURM_RESTART_COUNT:-0})) || [[ $state == REQUEUE* || $state == PENDING ]]; then
    echo 'the job was requeued'
  else
    case $state in
      CANCELLED) echo 'the job was cancelled' ;;
      PREEMPTED) echo 'the job was preempted' ;;
      NODE_FAIL) echo 'a node of the job failed' ;;
      COMPLETING) echo 'the job was cancelled or ended by Slurm' ;;
      '') echo "interrupted by SIG$1 (Slurm's controller did not say why)" ;;
      *) echo "interrupted by SIG$1" ;;
    esac
  fi
}
