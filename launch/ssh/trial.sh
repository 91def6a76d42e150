#!/usr/bin/env bash
# Ranks of one trial on the machines of the array hosts. Sourced by run_multinode.sh, after ssh.sh.
# shellcheck source=launch/state.sh
source "$REPO_DIR/launch/state.sh"
declare -a inputs=()

# Runs the ranks on each machine, and ends them on all of them when one fails or this shell dies.
ssh::together() {
  local work node status fd ended
  local -a command
  work=$(mktemp -d)
  # shellcheck disable=SC2064 # expand now
  trap "rm -rf -- '$work'" EXIT
  mkfifo "$work/ended"
  exec {ended}<>"$work/ended"
  for node in "${!hosts[@]}"; do
    mkfifo "$work/in.$node"
    runner::ranks "$node"
    (
      status=0
      "${ssh[@]}" "${hosts[node]}" "$(ssh::quote "$REPO_DIR/launch/ssh/node.sh" watch "${command[@]}")" \
        <"$work/in.$node" >"$work/reason.$node" || status=$?
      echo "$node $status" >&"$ended"
    ) &
  done
  trap '' PIPE # ssh::wait handles a machine that is gone already
  # These descriptors stay open as long as this shell lives; when they close, the commands are ended.
  for node in "${!hosts[@]}"; do
    exec {fd}>"$work/in.$node"
    { environment::print >&"$fd"; } 2>/dev/null || true
    inputs[node]=$fd
  done
  ssh::wait "$work" "$ended"
}

# Waits for every machine. The first failure gives the exit status. What a machine that does not share LOGDIR tells is left here.
ssh::wait() {
  local -r work=$1 ended=$2 error=$RUN_DIR/error_$TRIAL.txt
  local number status fd line first=0 left=${#hosts[@]} reason
  for (( ; left > 0; left--)); do
    read -r number status <&"$ended"
    # The names of dumps that this machine does not have.
    while read -r line; do if [[ $line == nccl_* ]]; then : >>"$RUN_DIR/$line"; fi; done <"$work/reason.$number"
    python::host "$REPO_DIR/launch/run/records.py" relay "$RUN_DIR" "$TRIAL" "$work/reason.$number" || true
    if ((status && ! first)); then
      first=$status reason="the ranks ended with exit status $status"
      if ((status == 255)); then reason='the ssh connection ended'; fi
      if [[ ! -s $error ]]; then echo "${hosts[number]}: $reason, see output_$TRIAL.txt" >"$error"; fi
      for fd in "${inputs[@]}"; do exec {fd}>&-; done
    fi
  done
  return "$first"
}
