#!/usr/bin/env bash
# Why does Slurm end this job? Sourced by run.sub.

# In words. Argument: the signal that this script got.
slurm::why() {
  local -r job=$(scontrol --oneliner show job "$SLURM_JOB_ID" 2>/dev/null)
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
      *) echo "interrupted by SIG$1" ;;
    esac
  fi
}
