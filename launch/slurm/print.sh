#!/usr/bin/env bash
# run.sub --print: what a job would be, by the functions of a run, whose steps print their srun line instead (LAUNCH_PRINT, step.sh).
# Starts, writes and checks nothing. Sourced by run.sub.
declare -a nodes mounts
# shellcheck source=launch/load.sh
source "$REPO_DIR/launch/load.sh" run/answers slurm/runner

print::main() {
  export LAUNCH_PRINT=1 ATTEMPT_NAME=bert_JOB_0 SLURM_JOB_NODELIST=''
  local i
  for ((i = 1; i <= DGXNNODES; i++)); do nodes+=("NODE$i"); done
  RUN_NAME=${RUN_NAME:-${DGXSYSTEM}_DATE_JOB}
  export RUN_NAME RUN_DIR=$LOGDIR/$RUN_NAME TRIAL=0
  print::gpus
  container::load slurm
  slurm::options
  slurm::step "${nodes[@]}"
  # shellcheck disable=SC2034 # for other parts
  srun=("${step[@]}" --mpi="${SLURM_MPI_TYPE:-none}")
  export MASTER_ADDR=ADDRESS_OF_NODE1

  print::part 'the job'
  print::sbatch
  print::part 'a container on each node'
  if [[ $CONTAINER_RUNTIME == none ]]; then echo none; else print::containers; fi
  print::part "the check of settings, data and weights"
  runner::python -m "${RANK_MODULE:-bert}" --check
  print::part "a trial's ranks"
  (RUN_DIR=$RUN_DIR/running_0 runner::trial)
  print::part 'mounts: source, target, ro or rw'
  if [[ $CONTAINER_RUNTIME == none ]]; then echo none; else printf '%s\n' "${mounts[@]//:/  }"; fi
  print::part 'settings that are exported; the ranks get all other exported variables, too'
  print::settings
}

# Where no node has gres, a job and its steps have none; without an answer from Slurm it is taken to have them.
print::gpus() {
  local nodes
  # shellcheck disable=SC2034 # for other parts
  nodes=$(scontrol --oneliner show node) && [[ $nodes && $nodes != *' Gres='*gpu* ]] || SLURM_GPUS_ON_NODE=$DGXNGPU
}

# What is known only in a job, or where Slurm is.
scontrol() { command scontrol "$@" 2>/dev/null || true; }
port::free() { echo "${MASTER_PORT:-PORT}"; }
# The job creates its own folders.
container::exists() { [[ -e $1 || " $LOGDIR ${CHECKPOINT_DIR:-} ${KERNEL_CACHE:-} " == *" $1 "* ]]; }

print::part() { printf '\n# %s\n' "$1"; }

# Options come from run.sub, from sbatch's own variables, and from the command line.
print::sbatch() {
  local name
  for name in $(compgen -e SBATCH_); do printf '%s=%q ' "$name" "${!name}"; done
  echo "sbatch -N $((DGXNNODES + SPARE_NODES)) $(sed -n 's/^#SBATCH //p' "$REPO_DIR/run.sub" | paste -sd' ') run.sub"
}

# The runtime's own commands, each of which would run on every node.
print::containers() {
  # shellcheck disable=SC2329 # for other parts
  answers::streamed() { "$@"; }
  # shellcheck disable=SC2329 # for other parts
  answers::run_on_all_nodes() { runner::everywhere "$@"; }
  # shellcheck disable=SC2329 # for other parts
  answers::complete() { :; }
  container::create 2>/dev/null
}

print::settings() {
  local name
  while read -r name; do
    if [[ ${!name+set} ]]; then printf '%s=%q\n' "$name" "${!name}"; fi
  done < <(sed -n '/^== Set by the launch/q; s/^\([A-Z][A-Z0-9_]*\).*/\1/p' "$REPO_DIR/launch/variables.txt" | grep -xF -f <(compgen -e) | sort)
}
