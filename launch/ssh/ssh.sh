#!/usr/bin/env bash
# Runs commands on the machines of the array hosts, over ssh, with the variables of this shell. Sourced by run_multinode.sh.
# The repository has the same path on all of them, and hosts[0], which runs rank 0, shares LOGDIR.
# shellcheck source=launch/load.sh
source "$REPO_DIR/launch/load.sh" run/environment
declare -a ssh=()

# Sets the array ssh, the command prefix for every machine. It never asks for a password, and detects lost connections.
ssh::command() {
  local -a options
  read -ra options <<<"${SSH_OPTIONS:-}"
  ssh=(ssh -T -o BatchMode=yes -o ConnectTimeout=30 -o ServerAliveInterval=15 -o ServerAliveCountMax=8 "${options[@]}")
}

# The words of a command as one line for a remote shell.
ssh::quote() { printf '%q ' "$@"; }

# Runs a command on one machine. Arguments: host, command.
ssh::run() {
  local -r host=$1
  shift
  environment::print 2>/dev/null | "${ssh[@]}" "$host" "$(ssh::quote "$REPO_DIR/launch/ssh/node.sh" run "$@")"
}

# Runs a command on every machine at once; fails if one of them fails.
runner::everywhere() {
  local host pid status=0
  local -a pids=()
  for host in "${hosts[@]}"; do
    ssh::run "$host" "$@" &
    pids+=($!)
  done
  for pid in "${pids[@]}"; do wait "$pid" || status=1; done
  return "$status"
}

# Checks all machines at once; stops with one line about the first that cannot take part, or about two names of one machine, whose GPUs
# would train twice.
ssh::check() {
  local number found problem twice
  found=$(
    for number in "${!hosts[@]}"; do ssh::look "${hosts[number]}" | sed "s/^/$number /" & done
    wait
  )
  problem=$(sort -n <<<"$found" | grep -v -m 1 '^[0-9]* is ') && log::die "${problem#* }"
  twice=$(sort -k 3 <<<"$found" | awk '$3 == last { print name " and " $4; exit } { name = $4; last = $3 }')
  [[ ! $twice ]] || log::die "HOSTS=${hosts[*]}: $twice are one machine: name each machine once"
}

# Prints in one line why a machine cannot take part; "is IDENTITY HOST" if it can.
ssh::look() {
  local -r host=$1
  local output status=0
  output=$(ssh::run "$host" "$REPO_DIR/launch/node/identity.sh" 2>&1) || status=$?
  if ((status == 255)); then
    echo "$host: ssh cannot connect (${output##*$'\n'}): try ${ssh[*]} $host true"
  elif ((status)); then
    echo "$host does not see $REPO_DIR: put the repository there, or on shared storage"
  elif [[ $CONTAINER_RUNTIME == none ]] &&
    ! ssh::run "$host" "$PYTHON" -c 'import importlib.util as u, sys; sys.exit(not u.find_spec("torch"))' 2>/dev/null; then
    echo "$host: PYTHON=$PYTHON does not exist or has no torch; give the path of one with torch"
  else
    echo "is ${output##*$'\n'} $host"
  fi
}

# Stops if hosts[0] would write the results elsewhere.
ssh::check_results() {
  local probe status=0
  LOGDIR=$(realpath -m -- "$LOGDIR")
  probe=$({ mkdir -p -- "$LOGDIR" && mktemp -- "$LOGDIR/.probe.XXXXXX"; } 2>/dev/null) ||
    log::die "LOGDIR=$LOGDIR: cannot write there; choose a folder you can write to"
  (ssh::run "${hosts[0]}" test -w "$probe") 2>/dev/null || status=$? # in a subshell: a trap's message must not go there
  rm -f -- "$probe"
  rmdir --ignore-fail-on-non-empty -- "$LOGDIR"
  ((status == 0)) || log::die "LOGDIR=$LOGDIR is not the same folder on ${hosts[0]}:" \
    'choose one on shared storage, or start this script on that machine'
}
