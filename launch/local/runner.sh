#!/usr/bin/env bash
# Ranks on this machine, in the current Python environment or in containers: the functions that trial.sh needs.
# shellcheck source=launch/load.sh
source "$REPO_DIR/launch/load.sh" run/platform node/binding

runner::prepare() {
  container::load local
  container::check
  node_state::stage
  container::create
}

runner::everywhere() { "$@"; }

runner::python() {
  container::arguments
  "${container[@]}" env PYTHONPATH="$REPO_DIR/implementations:$REPO_DIR${PYTHONPATH:+:$PYTHONPATH}" "$PYTHON" "$@"
}

runner::trial() {
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(binding::threads "$DGXNGPU")}
  # On one machine gloo needs no host name; a wrong one in /etc/hosts would hang it.
  export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo}
  container::arguments
  exec "${container[@]}" "$PYTHON" "$REPO_DIR/launch/run/torchrun.py" \
    --nnodes 1 --nproc-per-node "$DGXNGPU" --master-addr 127.0.0.1 --master-port "$(port::free)" \
    --no-python "$REPO_DIR/launch/run/rank.sh"
}
