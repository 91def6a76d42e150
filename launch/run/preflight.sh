#!/usr/bin/env bash
# Checks and records made once, before the first trial. Sourced by trial.sh.
# shellcheck source=launch/state.sh
source "$REPO_DIR/launch/state.sh"

# The trainer's own check, with its output, of the first trial that is to run: a restart is one only in the name of its run. Without
# an answer it did not run, whatever the exit status.
preflight::check() {
  local -r python=$PYTHON
  local -x TRIAL=0 RUN_DIR PYTHON=$REPO_DIR/launch/node/run_and_answer.sh
  RUN_DIR=$(realpath -m -- "$LOGDIR")/$RUN_NAME
  while ((TRIAL < NEXP - 1)) && trainer::complete "$TRIAL" "$RUN_DIR"; do TRIAL=$((TRIAL + 1)); done
  log::info 'checking the configuration'
  if trial::with_seed answers::streamed runner::python env "PYTHON=$python" "$python" -m "${RANK_MODULE:-bert}" --check &&
    grep -q '^answer ' <<<"$answers_output"; then return 0; fi
  log::die "this configuration cannot run: $(answers::program_error "$answers_output")"
}

# Creates the folders that ranks write to on every node, since a folder first created in a container ends with it. Ranks
# create those within LOGDIR themselves.
preflight::outputs() {
  local name
  for name in "${variables_outputs[@]}"; do
    if [[ ! ${!name:-} ]]; then continue; fi
    export "$name=$(realpath -ms -- "${!name}")"
    if [[ ${!name} == "$(realpath -ms -- "$LOGDIR")"/* ]]; then continue; fi
    # shellcheck disable=SC2016 # of the inner shell
    answers::run_on_all_nodes bash -c 'mkdir -p -- "$1" && { [[ $2 != CHECKPOINT_DIR ]] || { probe=$(mktemp -d -p "$1") && rmdir -- "$probe"; }; }' \
      - "${!name}" "$name" || answers::die "$name=${!name}: not a folder on every node" "$answers_output"
  done
}

# RUN_DIR/topology.txt: the hardware of each node in turn. A failure is only a warning.
preflight::record() {
  runner::everywhere python3 -B -s -S "$REPO_DIR/launch/node/record.py" 2>/dev/null | sort -s -t : -k 1,1 >"$RUN_DIR/topology.txt" ||
    log::warn 'the hardware of some nodes was not recorded, see topology.txt'
}
