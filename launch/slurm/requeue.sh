#!/usr/bin/env bash
# Has the job requeued, without the nodes that it left out. Sourced by slurm/supervisor.sh and by the guards.

# Returns, with a warning, if the job is not requeued; otherwise Slurm ends this script. Argument: why, in words.
requeue::job() {
  local -r excluded=$(restart::ask excluded | paste -sd,)
  local output ended='' i
  if [[ $excluded ]]; then requeue::exclude "$excluded"; fi
  trap '' INT HUP QUIT USR1
  trap 'ended=1' TERM
  if output=$(scontrol requeue "$SLURM_JOB" 2>&1) || [[ $ended ]]; then
    log::warn "job $SLURM_JOB is requeued, $1"
    # Exiting now would end the job.
    for ((i = 0; i < 600 && ! ended; i++)); do sleep 0.1 || true; done
    exit 143
  fi
  log::warn "job $SLURM_JOB is not requeued: $output"
}

# Has these nodes ($1) excluded, by a job of its own, since this one cannot do it while it runs.
requeue::exclude() {
  sbatch --quiet --job-name="without_$1" --nodes=1 --ntasks=1 --gres=none --time=10 --output=/dev/null --exclude="$1" \
    "$REPO_DIR/launch/slurm/exclude.sh" "$SLURM_JOB" "${SLURM_RESTART_COUNT:-0}" "$1" "$DGXNNODES-$((DGXNNODES + SPARE_NODES))" ||
    log::warn "$1 may be among the nodes of this job again"
}
