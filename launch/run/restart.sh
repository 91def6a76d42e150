#!/usr/bin/env bash
# Whether a run that failed is started again, and with what: the records of an attempt, the newest checkpoint, and what was tried
# before. RUN_DIR/restarts.txt has a line for each restart: job, progress, excluded nodes, time, text; also for nodes that a start left
# out, with LEFT_OUT as the progress. Sourced by supervisor.sh and by the guard of a node.
# shellcheck disable=SC2034,SC2154 # the plan is read by supervisor.sh; LOGDIR and RUN_NAME are of variables.sh

readonly AGAIN=75   # exit status of an attempt that ended because a new start may help (EX_TEMPFAIL)
readonly RESTARTS=3 # at most, without a new checkpoint or a finished trial between them
readonly LEFT_OUT='left out'
declare -a blamed=()
declare cause='' gave_up='' restart_text=''
declare -i restart_limit=$RESTARTS can_leave_out=1

# Does the user want runs to be resumed? As Python reads a setting that is 0 or 1.
restart::wanted() { [[ ${RESUME:-} == @(1|[Tt]rue|TRUE|[Yy]es|YES|[Oo]n|ON) ]]; }

# May a run that hangs, is killed or reaches its time limit be started again? It then resumes.
restart::resumes() { [[ ${CHECKPOINT_DIR:-} ]] && restart::wanted; }

# Does it continue the trial? The trainer resumes a checkpoint of the very same run by itself, but in pretraining's closed division.
restart::continues() { restart::resumes || [[ ${CHECKPOINT_DIR:-} && (${SUBMISSION_DIVISION:-} == open || ${RANK_MODULE:-} == finetune) ]]; }

# The trial that ran last, by its output; 0 before any.
restart::trial() {
  local newest
  newest=$(find "$LOGDIR/$RUN_NAME" -maxdepth 1 -name 'output_[0-9]*.txt' -printf '%T@ %f\n' 2>/dev/null | sort -n | tail -n 1)
  newest=${newest##*output_}
  newest=${newest%.txt}
  echo "${newest:-0}"
}

# Step of the newest checkpoint of the trial that ran last; 0 if there is none.
restart::checkpoint() {
  local newest='' folder
  if restart::continues && folder=$(trainer::checkpoints "$(restart::trial)") && [[ -d $folder ]]; then
    newest=$(find "$folder/" -maxdepth 2 -printf '%P\n' | sed -nE 's/^step_0*([0-9]+)(\/index)?\.pt$/\1/p' | sort -n | tail -n 1)
  fi
  echo "${newest:-0}"
}

restart::file() { echo "$LOGDIR/$RUN_NAME/restarts.txt"; }

# The job, or this script: an earlier one's restarts are not counted.
restart::job() { echo "${SLURM_JOB_ID:-$(uname -n)_$$}"; }

# Nodes that this job has excluded so far.
restart::excluded() {
  awk -F '\t' -v job="$(restart::job)" '$1 == job { print $3 }' "$(restart::file)" 2>/dev/null |
    tr ' ' '\n' | grep . | sort -u || true
}

# Why the attempt ended, by its own word; empty if it has none left.
restart::last() {
  local kind rank node step reason text=''
  while record::read; do if [[ $kind == last ]]; then text=$reason; fi; done <"$ATTEMPT_STATUS"
  echo "$text"
}

# Would a new start help? Sets cause, blamed (the nodes to leave out) and restart_limit. A lost node is always left out; one that
# hangs, does not answer or fails a test where the run can go on without it. A rank that was killed from outside is started once
# more where it was. A rank's own error blames no node, although the other ranks report it as missing.
restart::would_help() {
  local kind rank node step reason killed=''
  local -A of=() lost=()
  blamed=() cause='' restart_limit=$RESTARTS
  while record::read; do
    case $kind in
      lost) lost[$node]=1 ;;
      missing | unfit | broken)
        if ((${SPARE_NODES:-0})) || { [[ $kind != broken ]] && restart::resumes; }; then of[$node]=$reason; fi
        ;;
      killed) killed=$reason ;;
    esac
  done <"$ATTEMPT_STATUS"
  if ((${#lost[@]})); then
    mapfile -t blamed < <(printf '%s\n' "${!lost[@]}" | sort -V)
    cause='lost by Slurm' # which may have killed the others
  elif ((${#of[@]} && can_leave_out)); then
    mapfile -t blamed < <(printf '%s\n' "${!of[@]}" | sort -V)
    cause=${of[${blamed[0]}]}
  elif [[ $killed ]] && restart::resumes; then
    cause=$killed restart_limit=1
    return 0
  fi
  ((${#blamed[@]} == 1 || (${#blamed[@]} && ${#blamed[@]} < DGXNNODES)))
}

# How far the run has come: restarts without progress are counted.
restart::progress() {
  local -r folder=$LOGDIR/$RUN_NAME
  local -r trials=$(find "$folder" -maxdepth 2 -path "$folder/result_*.txt" -o -path '*/model_*/figures.json' 2>/dev/null | wc -l)
  echo "$trials trials, step $(restart::checkpoint)"
}

# May there be another restart? Otherwise sets gave_up. Argument: restarts without progress that are allowed.
restart::allowed() {
  local -r progress=$(restart::progress)
  if (($(cut -f 1,2 "$(restart::file)" 2>/dev/null | grep -v $'\t'"$LEFT_OUT\$" | tail -n "$1" |
    grep -cxF "$(restart::job)"$'\t'"$progress") < $1)); then return 0; fi
  gave_up="gave up: $1 restart$( (($1 == 1)) || echo s) brought no new checkpoint after step ${progress##* }"
  return 1
}

# Notes a restart in restarts.txt; sets restart_text. Arguments: the reason, the nodes to leave out.
restart::note() {
  local -r step=$(restart::checkpoint) folder=$LOGDIR/$RUN_NAME trial=$(restart::trial)
  local -r reached=$(cat -- "$folder"/{,running_*/}"step_$trial.txt" 2>/dev/null | sort -n | tail -n 1)
  restart_text="${2:+without ${*:2}: }$1"
  if ! restart::continues; then
    restart_text+='; the trial is repeated'
  else
    restart_text+="; continues from step $step"
    if ((reached > step)); then restart_text+=", repeating about $((reached - step)) steps"; fi
  fi
  restart::write "$(restart::progress)" "$restart_text" "${@:2}"
}

# Adds a line. Arguments: progress, text, nodes.
restart::write() {
  mkdir -p -- "$LOGDIR/$RUN_NAME"
  printf '%s\t%s\t%s\t%s\t%s\n' "$(restart::job)" "$1" "${*:3}" "$(date +%FT%T)" "$2" >>"$(restart::file)"
}
