#!/usr/bin/env bash
# How the ranks run on this machine, in the current Python environment: the functions that trial.sh asks for. Sourced by
# run_local.sh and certify.sh.

runner::everywhere() { "$@"; }

runner::python() { PYTHONPATH=$REPO_DIR/implementations:$REPO_DIR${PYTHONPATH:+:$PYTHONPATH} "$PYTHON" "$@"; }

runner::trial() {
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(binding::threads "$DGXNGPU")}
  # On one machine gloo needs no host name; a wrong one in /etc/hosts would hang it.
  GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo} exec "$PYTHON" "$REPO_DIR/launch/run/torchrun.py" \
    --nnodes 1 --nproc-per-node "$DGXNGPU" --master-addr 127.0.0.1 --master-port "$(port::free)" \
    --no-python "$REPO_DIR/launch/run/rank.sh"
}

runner::cleanup() { node_state::undo; }
