#!/usr/bin/env bash
# Did a command run on every node? Only the nodes' own output counts: if a Slurm plugin fails on a node, srun may start nothing
# there and still end with status 0. A command that succeeded on a node prints "answer NODE" there (launch/node/run_and_answer.sh).
# Sourced by the run scripts, which define runner::everywhere and, if they know the names, runner::nodes.

declare answers_output=''

# Runs a command on every node; true only if each reports success. answers_output: all output.
answers::run_on_all_nodes() {
  answers_output=$(runner::everywhere "$REPO_DIR/launch/node/run_and_answer.sh" "$@" 2>&1) && answers::complete "$answers_output"
}

# Runs a command and streams its output, without the answers, to stderr; sets answers_output. Status: the command's.
answers::streamed() {
  local line=''
  answers_output=''
  while IFS= read -r line || [[ $line ]]; do
    if [[ $line != 'answer '* ]]; then printf '%s\n' "$line" >&2; fi
    answers_output+=$line$'\n'
  done < <("$@" 2>&1)
  wait "$!"
}

# Does this text have an answer from every node?
answers::complete() { (($(grep -c '^answer ' <<<"$1") >= DGXNNODES)); }

# Why not, in one line: the missing nodes, unless all are missing, and the error.
answers::why() {
  answers::with_nodes "$1" "$(answers::reason "$1")"
}

# Stops with one line: a command ($2, its output) did not run on every node. Nodes that did not answer while others did are reported,
# so that the run can go on without them. Arguments: what failed, the output, the reason (of the output).
answers::die() {
  local -r reason=${3:-$(answers::why "$2")}
  local node
  if grep -q '^answer ' <<<"$2"; then
    for node in $(answers::missing "$2"); do record::report broken - "$node" - "$1: $reason"; done
  fi
  log::die "$1: $reason"
}

# Nodes without an answer in this output, separated by spaces.
answers::missing() {
  runner::nodes | grep -vxF -f <(sed -n 's/^answer //p' <<<"$1") | paste -sd' ' || true
}

# Prefixes a reason ($2) with the names of the nodes that did not answer; if none did, with those that srun names.
answers::with_nodes() {
  local reason=$2 missing=''
  if grep -q '^answer ' <<<"$1" && declare -F runner::nodes >/dev/null; then
    missing=$(answers::missing "$1")
  elif ((DGXNNODES > 1)); then
    missing=$(sed -nE 's/^srun: error: ([^ :]+): tasks? .*/\1/p' <<<"$1" | sort -u | paste -sd' ')
  fi
  if [[ $missing && $reason != *"${missing%% *}"* ]]; then reason="$missing: $reason"; fi
  echo "$reason"
}

# Why one of this repository's programs ended, in one line: by contract the last line that it prints is "PROGRAM: error: REASON".
answers::program_error() {
  local -r reason=$(answers::reason "$1")
  echo "${reason#*: error: }"
}

# The line that best explains why a step failed: the program's own rather than srun's.
answers::reason() {
  local text
  text=$(grep -v '^answer ' <<<"$1" | grep -v '^[[:space:]]*$') || text='no output'
  {
    grep -v '^srun: \|^slurmstepd: ' <<<"$text" | tail -n 1 | grep . ||
      grep '^srun: error: ' <<<"$text" | grep -v 'Exited with exit code\|Terminated$' | tail -n 1 | grep . ||
      tail -n 1 <<<"$text"
  } | sed 's/^srun: error: //'
}
