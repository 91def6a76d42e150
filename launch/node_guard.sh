#!/usr/bin/env bash
# A guard on every node of a Slurm job (guard.sh), outside containers, which undoes at the end what the run did there. Its
# input ends with this script or by node_guard::end. Sourced by run.sub.
# shellcheck disable=SC2154 # srun is of slurm.sh
# shellcheck source=launch/patience.sh
source "$REPO_DIR/launch/patience.sh"
readonly GUARD_PATIENCE=300 # seconds: containers and staged data are large

declare node_guard='' node_guard_input=''

node_guard::needed() { [[ ${PYXIS_NAME:-}${GPU_CLOCKS:-}${STAGED:-} ]]; }

node_guard::start() {
  if ! node_guard::needed; then return 0; fi
  if ! slurm::starts "${srun[@]}" --overlap --nodes=1 --ntasks=1; then
    log::warn 'no step can run beside another (srun --overlap): after scancel or the time limit, what this job makes on the' \
      'nodes stays there until the next one removes it'
    return 0
  fi
  # GPUs are left to the other steps, but for a guard that resets their clocks.
  local -a options=()
  if [[ ! ${GPU_CLOCKS:-} ]]; then options=(--gres=none); fi
  exec {node_guard_input}> >(exec "${srun[@]}" "${options[@]}" --input=all --overlap --ntasks="$DGXNNODES" \
    --ntasks-per-node=1 "$REPO_DIR/launch/guard.sh" >/dev/null 2>&1)
  node_guard=$!
}

# Ends the guards and waits for them; where there are none, a step does their work.
node_guard::end() {
  if [[ $node_guard ]]; then
    exec {node_guard_input}>&-
    patience::wait "$node_guard" "$GUARD_PATIENCE" || true
    node_guard=''
  elif node_guard::needed; then
    "${srun[@]}" --ntasks="$DGXNNODES" --ntasks-per-node=1 "$REPO_DIR/launch/undo.sh" || true
  fi
}
