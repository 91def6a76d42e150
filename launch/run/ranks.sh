#!/usr/bin/env bash
# All ranks of one run as a separate process group. Sourced by trial.sh.
# shellcheck source=launch/state.sh
source "$REPO_DIR/launch/state.sh"

readonly OUTLIVE=90 # seconds that a launcher gets to end the other ranks when one has failed

# Runs the ranks as a background job, so that a signal to this script is handled at once and ends them all.
# Arguments: their folder, the file of their output, the seconds after which they are ended, with status 124 (0: never).
trial::ranks() {
  local -r folder=$1 output=$2 limit=$3 begun=$SECONDS
  local status=0 earlier
  earlier=$(stat -c %s -- "$output" 2>/dev/null) || earlier=0 # bytes of earlier attempts, of other nodes
  before=${!:-}                                               # the last job before the ranks
  set -m
  {
    exec {lock_file}>&-
    # Slurm signals every process of a job: if this one ended before its ranks, the reason would not be the last line.
    trap : INT TERM HUP USR1
    RUN_DIR=$folder runner::trial 2>&1 | (
      trap '' INT TERM HUP USR1
      exec tee -a -- "$output"
    )
  } &
  group=$!
  unset before
  child::bind "$group" "$$" 20 runner::cleanup
  watcher=$!
  disown "$watcher" # if it has to be killed, bash would say so after the last line
  trial::bound "$group" "$folder/status" "$limit" &
  set +m
  wait "$group" || status=$?
  if ((limit && SECONDS - begun >= limit)); then status=124; fi
  if ((status)); then platform::blame_by_output < <(tail -c "+$((earlier + 1))" -- "$output"); fi
  group=''
  return "$status"
}

# Runs the ranks of a test in a new folder ($1), for at most $2 seconds (0: as long as it takes). If one fails, or leaves no file $3,
# sets problem to the reason, and reports it as that of a trial.
trial::test() {
  local -r folder=$1 limit=$2 proof=${3:-}
  local kind status=0
  local -a reasons=()
  rm -rf -- "$folder"
  mkdir -- "$folder"
  trial::ranks "$folder" "$folder/output.txt" "$limit" || status=$?
  # shellcheck disable=SC2034 # for other parts
  if ((status == 124)); then reasons=("it did not end in $limit s"); fi
  kind=$(trial::kind "$folder" "$status")
  if [[ $status == 0 && ! $kind ]] && [[ ! $proof || -s $folder/$proof ]]; then return 0; fi
  # shellcheck disable=SC2034 # for other parts
  problem=$(trial::reason 0 "$status" "$folder" "$kind" "$folder/output.txt")
  trial::blame "$folder" 0 "$kind"
  return 1
}

# Ends the ranks ($1) that outlive the record of a failure ($2) or a number of seconds ($3, 0: none): srun waits for ever for a rank
# whose node was restarted so soon that Slurm did not notice.
trial::bound() {
  local -i failed=0
  SECONDS=0
  child::become_watcher
  while child::lives "$1"; do
    child::pause
    if [[ -s $2 ]] && ((failed++ == OUTLIVE)); then child::stop "$1" 20; fi
    if (($3 && SECONDS >= $3)); then child::stop "$1" 40; fi
  done
}

# Signals the ranks of a running trial to end. Argument: the signal that this script got.
trial::signal_group() {
  local signal=TERM
  # The signal may have come just as they were started.
  if [[ ! $group && ${before+set} && ${!:-} != "$before" ]]; then group=$!; fi
  if [[ $1 == USR1 ]]; then signal=USR1; fi # srun answers TERM by ending the step within KillWait
  if [[ $group ]]; then kill -"$signal" -- "-$group" 2>/dev/null || true; fi
}

# Waits for the ranks to end, and kills the rest when SECONDS reaches the argument. By the clock, because this script itself may
# be killed soon after its signal, before it could print the reason.
trial::end_group() {
  if [[ ! $group ]]; then return 0; fi
  while child::lives "-$group" && ((SECONDS < $1 + 2)); do
    if ((SECONDS >= $1)); then kill -KILL -- "-$group" 2>/dev/null || true; fi
    sleep 0.1
  done
}
