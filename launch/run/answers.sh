#!/usr/bin/env bash
# Did a command run on every node? Only the nodes' own output counts: if a Slurm plugin fails on a node, srun may start nothing
# there and still end with status 0. A command that succeeded on a node prints "answer NODE" there (launch/node/run_and_answer.sh).
# Sourced by the run scripts, which define runner::everywhere.
# shellcheck source=launch/state.sh
source "$REPO_DIR/launch/state.sh"

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

# What answers.py says about an output ($2): why, reason or missing ($1).
answers::ask() { python::host "$REPO_DIR/launch/run/answers.py" "$1" "${nodes[*]}" "${@:3}" <<<"$2"; }

answers::why() { answers::ask why "$@"; }

# Stops with one line: a command ($2, its output) did not run on every node. Nodes that did not answer while others did are reported,
# so that the run can go on without them. Arguments: what failed, the output, patterns of a line that explains it (answers.py).
answers::die() {
  local -r reason=$(answers::why "${@:2}")
  local node
  for node in $(answers::ask missing "$2"); do record::report broken - "$node" - "$1: $reason"; done
  log::die "$1: $reason"
}

# Why one of this repository's programs ended, in one line: by contract the last line that it prints is "PROGRAM: error: REASON".
answers::program_error() {
  local -r reason=$(answers::ask reason "$1")
  echo "${reason#*: error: }"
}
