#!/usr/bin/env bash
# Restarts for long runs: when a node is lost, a rank hangs or a test names a node, the run restarts without that node from the
# newest checkpoint: in the same job if enough nodes remain (SPARE_NODES), otherwise the job is requeued. At the time limit it is
# requeued too. RUN_DIR/restarts.txt has a line for each. Sourced by run.sub and lost.sh, after job.sh.
# shellcheck disable=SC2153,SC2154 # nodes is of job.sh, RUN_DIR, RUN_NAME and lock_file are of variables.sh

readonly RESTARTS=3 # at most, without a new checkpoint or a finished trial between them

# Does a new start resume the trial?
restart::resumes() { [[ ${CHECKPOINT_DIR:-} && ${RESUME:-} == [1tyo]* ]]; }

# Step of the newest checkpoint; 0 if there is none.
restart::checkpoint() {
  local newest=''
  if restart::resumes && [[ -d $CHECKPOINT_DIR ]]; then
    newest=$(find "$CHECKPOINT_DIR" -maxdepth 2 -name 'step_*.pt' -o -path '*/step_*/index.pt' -o -path '*/deepspeed_*/bert.pt' |
      sed -nE 's/.*_0*([0-9]+)(\.pt|\/[a-z]+\.pt)$/\1/p' | sort -n | tail -n 1)
  fi
  echo "${newest:-0}"
}

# Nodes that this job has excluded so far.
restart::excluded() {
  awk -F '\t' -v job="$SLURM_JOB_ID" '$1 == job { print $3 }' "$LOGDIR/$RUN_NAME/restarts.txt" 2>/dev/null |
    tr ' ' '\n' | grep . | sort -u || true
}

# Restarts the run and does not return, or warns why it cannot. Arguments: the reason, the nodes to exclude.
restart::begin() {
  local -r file=$RUN_DIR/restarts.txt step=$(restart::checkpoint)
  local -r trials=$(find "$RUN_DIR" -maxdepth 2 -path "$RUN_DIR/result_*.txt" -o -path '*/model_*/figures.json' | wc -l)
  local -r progress="$trials trials, step $step"
  local -r reached=$(cat -- "$RUN_DIR"/{,running_*/}step_*.txt 2>/dev/null | sort -n | tail -n 1)
  local text="${2:+without ${*:2}: }${1%%, DIST_TIMEOUT=*}"
  if (($(tail -n "$RESTARTS" "$file" 2>/dev/null | cut -f 1,2 | grep -cxF "$SLURM_JOB_ID"$'\t'"$progress") >= RESTARTS)); then
    log::warn "not restarted: $RESTARTS restarts brought no new checkpoint after step $step"
    return 0 # in a trap a bare return has the previous status
  fi
  if ! restart::resumes; then
    text+='; the trial is repeated'
  else
    text+="; continues from step $step"
    if ((reached > step)); then text+=", repeating about $((reached - step)) steps"; fi
  fi
  printf '%s\t%s\t%s\t%s\t%s\n' "$SLURM_JOB_ID" "$progress" "${*:2}" "$(date +%FT%T)" "$text" >>"$file"
  if (($# > 1)) && slurm::choose_nodes; then
    log::warn "restarts on ${nodes[*]}, $text"
    restart::reexecute
  fi
  restart::requeue "$text"
}

# Undoes the run's changes to the nodes, of which one may not respond.
restart::clean() {
  set -m
  runner::cleanup >/dev/null 2>&1 &
  set +m
  child::wait "$!" "$GUARD_PATIENCE" || true
  trap - EXIT
}

# Executes this script again, in the environment with which the job started.
restart::reexecute() {
  local name entry
  local -r run_name=${RUN_DIR##*/}
  local -A first=()
  restart::clean
  while IFS= read -r -d '' entry; do first[${entry%%=*}]=${entry#*=}; done <"/proc/$$/environ"
  for name in $(compgen -e); do
    if [[ ! ${first[$name]+set} ]]; then unset "$name"; else export "$name=${first[$name]}"; fi
  done
  for name in "${!first[@]}"; do if [[ $name == SLURM_* ]]; then export "$name=${first[$name]}"; fi; done # job.sh unset them
  exec {lock_file}>&-
  RUN_NAME=$run_name exec bash "$0"
}

# Requeues this job and exits. Nodes can be excluded only once the job is pending, so a separate job does that.
restart::requeue() {
  local exclude output excluded ended='' i
  excluded=$(restart::excluded | paste -sd,)
  restart::clean
  if [[ $excluded ]]; then
    exclude="until scontrol update jobid=$SLURM_JOB_ID ExcNodeList=$excluded NumNodes=$DGXNNODES-$((DGXNNODES + SPARE_NODES)); do sleep 2; done"
    sbatch --quiet --job-name="without_$excluded" --nodes=1 --ntasks=1 --gres=none --time=10 --output=/dev/null --wrap="$exclude" ||
      log::warn "$excluded may be among the nodes of this job again"
  fi
  trap '' INT HUP QUIT USR1
  trap 'ended=1' TERM
  if output=$(scontrol requeue "$SLURM_JOB_ID" 2>&1) || [[ $ended ]]; then
    log::warn "job $SLURM_JOB_ID is requeued, $1"
    # Exiting now would end the job.
    for ((i = 0; i < 600 && ! ended; i++)); do sleep 0.1 || true; done
    exit 143
  fi
  log::warn "job $SLURM_JOB_ID is not requeued: $output"
}
