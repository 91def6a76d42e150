#!/usr/bin/env bash
# A run of days outlives its nodes and its time limit. Where a node is lost, a rank hangs or a test names a node, it begins
# again without that node, from the newest checkpoint: in the same job where enough nodes are left (SPARE_NODES), else the job
# is requeued. RUN_DIR/restarts.txt has a line each. Sourced by run.sub and lost.sh, after job.sh.
# shellcheck disable=SC2153,SC2154 # nodes is of job.sh, RUN_DIR, RUN_NAME and lock_file are of variables.sh

readonly RESTARTS=3 # at most, without a new checkpoint or a finished trial between them

# Is a trial that breaks off continued?
restart::resumes() { [[ ${CHECKPOINT_DIR:-} && ${RESUME:-} == [1tyo]* ]]; }

# The step of the newest checkpoint; 0 where there is none.
restart::checkpoint() {
  local newest=''
  if restart::resumes && [[ -d $CHECKPOINT_DIR ]]; then
    newest=$(find "$CHECKPOINT_DIR" -maxdepth 2 -name 'step_*.pt' -o -path '*/step_*/index.pt' -o -path '*/deepspeed_*/bert.pt' |
      sed -nE 's/.*_0*([0-9]+)(\.pt|\/[a-z]+\.pt)$/\1/p' | sort -n | tail -n 1)
  fi
  echo "${newest:-0}"
}

# The nodes that this job has left out so far.
restart::left_out() {
  awk -F '\t' -v job="$SLURM_JOB_ID" '$1 == job { print $3 }' "$LOGDIR/$RUN_NAME/restarts.txt" 2>/dev/null |
    tr ' ' '\n' | grep . | sort -u || true
}

# Begins the run again, which does not return; or says why it may not. Arguments: the reason, the nodes to leave out.
restart::begin() {
  local -r file=$RUN_DIR/restarts.txt step=$(restart::checkpoint)
  local -r trials=$(find "$RUN_DIR" -maxdepth 2 -path "$RUN_DIR/result_*.txt" -o -path '*/model_*/figures.json' | wc -l)
  local -r progress="$trials trials, step $step"
  local -r reached=$(cat -- "$RUN_DIR"/{,running_*/}step_*.txt 2>/dev/null | sort -n | tail -n 1)
  local text="${2:+without ${*:2}: }${1%%, DIST_TIMEOUT=*}"
  if (($(tail -n "$RESTARTS" "$file" 2>/dev/null | cut -f 1,2 | grep -cxF "$SLURM_JOB_ID"$'\t'"$progress") >= RESTARTS)); then
    log::warn "not begun again: $RESTARTS restarts have brought no new checkpoint after step $step"
    return 0 # in a trap a bare return has the status of before
  fi
  if ! restart::resumes; then
    text+='; the trial is repeated'
  else
    text+="; continues from step $step"
    if ((reached > step)); then text+=", repeating about $((reached - step)) steps"; fi
  fi
  printf '%s\t%s\t%s\t%s\t%s\n' "$SLURM_JOB_ID" "$progress" "${*:2}" "$(date +%FT%T)" "$text" >>"$file"
  if (($# > 1)) && slurm::choose_nodes; then
    log::warn "begins again on ${nodes[*]}, $text"
    restart::again
  fi
  restart::requeue "$text"
}

# Undoes what was done on the nodes, of which one may not answer.
restart::clean() {
  set -m
  runner::cleanup >/dev/null 2>&1 &
  set +m
  child::wait "$!" "$GUARD_PATIENCE" || true
  trap - EXIT
}

# Becomes this script once more, in the environment that the job began with.
restart::again() {
  local name entry
  local -r run_name=${RUN_DIR##*/}
  local -A first=()
  restart::clean
  while IFS= read -r -d '' entry; do first[${entry%%=*}]=${entry#*=}; done <"/proc/$$/environ"
  for name in $(compgen -e); do
    if [[ ! ${first[$name]+set} ]]; then unset "$name"; else export "$name=${first[$name]}"; fi
  done
  for name in "${!first[@]}"; do if [[ $name == SLURM_* ]]; then export "$name=${first[$name]}"; fi; done # that job.sh unset
  exec {lock_file}>&-
  RUN_NAME=$run_name exec bash "$0"
}

# Has Slurm begin this job again, and ends. Only once a job is pending can its nodes be changed, by a job of its own.
restart::requeue() {
  local said left_out ended='' i
  left_out=$(restart::left_out | paste -sd,)
  restart::clean
  if [[ $left_out ]]; then
    said="until scontrol update jobid=$SLURM_JOB_ID ExcNodeList=$left_out NumNodes=$DGXNNODES-$((DGXNNODES + SPARE_NODES)); do sleep 2; done"
    sbatch --quiet --job-name="without_$left_out" --nodes=1 --ntasks=1 --gres=none --time=10 --output=/dev/null --wrap="$said" ||
      log::warn "$left_out may be among the nodes of this job again"
  fi
  trap '' INT HUP QUIT USR1
  trap 'ended=1' TERM
  if said=$(scontrol requeue "$SLURM_JOB_ID" 2>&1) || [[ $ended ]]; then
    log::warn "job $SLURM_JOB_ID is requeued, $1"
    # An end of its own now would be the job's.
    for ((i = 0; i < 600 && ! ended; i++)); do sleep 0.1 || true; done
    exit 143
  fi
  log::warn "job $SLURM_JOB_ID is not requeued: $said"
}
