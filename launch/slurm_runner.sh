#!/usr/bin/env bash
# How a Slurm job runs its ranks: the functions that trial.sh asks for. Sourced by run.sub and certify.sub, after slurm.sh.
# shellcheck disable=SC2034,SC2154 # the state is shared with slurm.sh, container.sh, ending.sh and variables.sh
declare -a srun=() container=()

runner::prepare() {
  trap slurm::time_is_short USR1 # two minutes before the time limit, see --signal in run.sub
  slurm::check
  container::load pyxis
  container::check
  slurm::srun_command
  RUN_NAME=${RUN_NAME:-$(slurm::run_name)}
  MASTER_ADDR=$(slurm::master_address)
  runner::everywhere "$REPO_DIR/launch/leftovers.sh" >/dev/null 2>&1 || true
  node_guard::start
  node_state::stage
  container::create
}

runner::nodes() { scontrol show hostnames "$SLURM_JOB_NODELIST"; }

runner::why() { slurm::why "$1"; }

runner::everywhere() { "${srun[@]}" --overlap --ntasks="$DGXNNODES" --ntasks-per-node=1 "$@"; }

# Images and their hooks set some variables of PyTorch themselves, and theirs would win over exported ones.
runner::python() {
  container::arguments
  "${srun[@]}" --nodes=1 --ntasks=1 "${container[@]}" env RANK=0 LOCAL_RANK=0 WORLD_SIZE="$WORLD_SIZE" \
    PYTHONPATH="$REPO_DIR/implementations:$REPO_DIR${PYTHONPATH:+:$PYTHONPATH}" "$PYTHON" "$@"
}

runner::trial() {
  container::arguments
  exec "${srun[@]}" --ntasks="$WORLD_SIZE" --ntasks-per-node="$DGXNGPU" --kill-on-bad-exit=1 "${container[@]}" \
    env -u RANK -u LOCAL_RANK -u WORLD_SIZE MASTER_ADDR="$MASTER_ADDR" MASTER_PORT="$(port::free)" \
    OMP_NUM_THREADS="${OMP_NUM_THREADS:-}" "$REPO_DIR/launch/rank.sh"
}

runner::cleanup() {
  container::remove
  node_guard::end
}
