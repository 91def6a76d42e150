#!/usr/bin/env bash
# A run's changes to its nodes: GPU clocks and staged data; cleanup.sh undoes them however the run ends. Sourced by the run
# attempts. No step can be started once Slurm ends the job, so guards on the nodes do it then.
# shellcheck source=launch/state.sh
source "$REPO_DIR/launch/state.sh"

# Checks the settings, before anything is changed.
node_state::check() {
  local clocks=${GPU_CLOCKS:-}
  [[ ! $clocks || $clocks =~ ^[1-9][0-9]*(,[1-9][0-9]*)?$ ]] ||
    log::die "GPU_CLOCKS='$clocks': expected MHz, or LOWEST,HIGHEST, as nvidia-smi --lock-gpu-clocks takes them"
  [[ ! ${STAGE_DIR:-} || $STAGE_DIR == /* ]] || log::die "STAGE_DIR=$STAGE_DIR: expected an absolute path on a local disk of each node"
  if [[ ${STAGE_DIR:-} ]]; then
    ! variables::on SYNTH_DATA || log::die 'STAGE_DIR is set, and SYNTH_DATA=1 reads no data: unset one of them'
    export STAGED=${STAGE_DIR%/}/$ATTEMPT_NAME
  fi
}

node_state::lock_clocks() {
  if [[ ! ${GPU_CLOCKS:-} ]]; then return 0; fi
  answers::run_on_all_nodes "$REPO_DIR/launch/node/clocks.sh" set ||
    answers::die "GPU_CLOCKS=$GPU_CLOCKS: not set on every node" "$answers_output"
  log::info "GPU clocks locked to $GPU_CLOCKS MHz on every node until the end"
}

# With STAGE_DIR, copies the data to every node, and points the data variables to the copies.
node_state::stage() {
  local name
  local -a sources=()
  if [[ ! ${STAGE_DIR:-} ]]; then return 0; fi
  for name in "$(variables::data)" EVALDIR; do
    [[ ${!name:-} ]] || log::die "STAGE_DIR is set, and $name is not"
    sources+=("$name=$(realpath -- "${!name}")")
    export "$name=$STAGED/$name"
  done
  log::info "staging to $STAGED on every node: ${sources[*]}"
  answers::run_on_all_nodes "$REPO_DIR/launch/node/stage.sh" "$STAGED" "${sources[@]}" ||
    answers::die "STAGE_DIR=$STAGE_DIR: not staged on every node" "$answers_output"
  local -r digests=$(sed -n 's/^staged //p' <<<"$answers_output" | sort -u)
  (($(wc -l <<<"$digests") == 1)) ||
    log::die "STAGE_DIR=$STAGE_DIR: the nodes read different data: $(paste -sd';' <<<"$digests"); see launch/doctor.sh verify"
  log::info "staged $digests"
}

node_state::undo() {
  if [[ ${GPU_CLOCKS:-}${STAGED:-} ]]; then runner::everywhere "$REPO_DIR/launch/node/cleanup.sh" now; fi
}

# Drops the page caches, as the rules require before each trial. True only if they were dropped on every node.
node_state::drop_caches() {
  if [[ $CLEAR_CACHES == 0 ]]; then return 1; fi
  answers::run_on_all_nodes "$REPO_DIR/launch/node/drop_caches.sh" && return
  [[ $CLEAR_CACHES == 1 ]] || log::die "CLEAR_CACHES=require, and the page caches were not dropped:" \
    "allow 'sudo sysctl' as launch/doctor.sh says, or set CLEAR_CACHES=1"
  log::warn "page caches not dropped (launch/doctor.sh says what sudo must allow): a closed run on GPUs will not start"
  return 1
}
