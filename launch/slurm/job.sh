#!/usr/bin/env bash
# The Slurm job of a run: checks that the allocation fits the config, and prepares srun; job.py knows how and why Slurm ends
# it. Sourced by run.sub and certify.sub.

declare -a step=() step_options=() # the start of a step, by slurm::step; its options that are the same for all
declare step_problem=''
declare -i shutdown_seconds=20 # that ranks get to end after a signal to this script
# This job as Slurm's commands take it: the last task of an array has the number of the array, which names all of its tasks.
SLURM_JOB=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID:-}}
SLURM_JOB=${SLURM_JOB:-${SLURM_JOB_ID:-}}
SLURM_STEP_OPTIONS='SRUN_CPUS_PER_TASK|SLURM_(NNODES|JOB_NUM_NODES|NTASKS.*|NPROCS|NCORES_.*|NSOCKETS_.*|TASKS_PER_NODE|CPUS_PER_.*|CPU_.*'
SLURM_STEP_OPTIONS+='|CORE_SPEC|THREAD.*|HINT|DISTRIBUTION|GPUS|GPUS?_(PER|BIND|FREQ).*|GRES.*|STEP_GRES|TRES_.*|MEM_(PER_[CG]PU|BIND.*)'
SLURM_STEP_OPTIONS+='|EXACT|EXCLUSIVE|OVERCOMMIT|WHOLE|SPREAD_JOB|USE_MIN_NODES|ARBITRARY_NODELIST|HOSTFILE|TIMELIMIT|WAIT|NO_KILL'
SLURM_STEP_OPTIONS+='|KILL_BAD_EXIT|LABELIO|STD(IN|OUT|ERR)MODE|SRUN_MULTI|EXPORT_ENV|REMOTE_CWD|WORKING_DIR|TEST_EXEC)'

# Refuses what a job of this script cannot be, before anything else fails because of it.
slurm::refuse() {
  local output image=SLURM_SPANK__SLURM_SPANK_OPTION_pyxis_container_image
  [[ ! ${SLURM_HET_SIZE:-} ]] || log::die "job $SLURM_JOB_ID is heterogeneous (sbatch ... : ...): submit one component, of equal nodes"
  [[ ! ${!image:-}${SLURM_CONTAINER:-} ]] ||
    log::die "sbatch started this script in the container ${!image:-$SLURM_CONTAINER}: submit without that option;" \
      "CONT=${!image:-IMAGE} has the ranks run in it"
  output=$(scontrol show hostnames "${SLURM_JOB_NODELIST:-}" 2>&1) ||
    log::die "scontrol does not work on $(uname -n), the first node of the job: ${output##*$'\n'}"
}

slurm::check() {
  local -r wanted=$((DGXNNODES + SPARE_NODES))
  [[ -n ${SLURM_JOB_ID:-} ]] ||
    log::die "run.sub runs in a Slurm job: sbatch -N $wanted run.sub; without Slurm, ./run_local.sh"
  slurm::refuse
  ((SLURM_JOB_NUM_NODES == wanted || (${SLURM_RESTART_COUNT:-0} && SLURM_JOB_NUM_NODES >= DGXNNODES))) ||
    log::die "this job has $SLURM_JOB_NUM_NODES nodes and the config wants $DGXNNODES$( ((SPARE_NODES)) &&
      echo ", with SPARE_NODES $wanted"): sbatch -N $wanted run.sub"
  if [[ ${DEVICE:-auto} == cpu ]]; then return 0; fi
  if [[ -z ${SLURM_GPUS_ON_NODE:-} ]]; then
    # Without gres every job sees all GPUs; with gres, this one sees none and would train on CPUs.
    ! grep -q ' Gres=[^ ]*gpu' <<<"$(scontrol --oneliner show node "${SLURMD_NODENAME:-}" 2>/dev/null)" ||
      log::die "this job has no GPUs: sbatch --gres=${GPU_GRES:-gpu}:$DGXNGPU run.sub (or export SBATCH_GRES);" \
        'on CPUs, DEVICE=cpu'
    return 0
  fi
  ((SLURM_GPUS_ON_NODE >= DGXNGPU)) ||
    log::die "this job has $SLURM_GPUS_ON_NODE GPUs a node and the config wants DGXNGPU=$DGXNGPU:" \
      'sbatch --exclusive, or another config'
}

# What job.py says about this job, in time for the last line.
slurm::ask() {
  python::host "$REPO_DIR/launch/slurm/job.py" "$((shutdown_seconds < 18 ? shutdown_seconds / 2 + 1 : 10))" "$SLURM_JOB" "$@"
}

# Nodes of this job, without those that Slurm has lost.
slurm::nodes() { slurm::ask nodes; }

# The same without those that were left out.
slurm::fit_nodes() { slurm::nodes | grep -vxF -f <(restart::ask excluded) || true; }

# Unsets what sbatch's options, and a user's profile, leave in the environment for srun: they would apply to each step too, contradict
# it ("--ntasks-per-gpu" and its kin), add to its output, or keep the run's variables from it.
slurm::forget_options() {
  local name
  for name in $(compgen -e | grep -xE "$SLURM_STEP_OPTIONS"); do unset "$name"; done
}

# Sets the options that all steps of this job have.
slurm::options() {
  local -r gres=${GPU_GRES:-gpu} config=$(scontrol show config)
  slurm::forget_options
  # Beside the guards, and although resources of a step that ended with a lost node are not released.
  step_options=(--overlap --distribution=block --input=none)
  # Slurm's own binding ignores GPUs; run_and_time.sh binds.
  if grep -q '^TaskPlugin.*affinity' <<<"$config"; then step_options+=(--cpu-bind=none); fi
  # A step that does not ask for GPUs gets none, even in a job that has them all.
  if [[ ${DEVICE:-auto} != cpu && $gres != none && -n ${SLURM_GPUS_ON_NODE:-} ]]; then step_options+=(--gres="$gres:$DGXNGPU"); fi
  slurm::shutdown_seconds "$config"
}

# Sets the array step, the command prefix of a step on these nodes.
slurm::step() {
  local -r others=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | grep -vxF -f <(printf '%s\n' "$@") | paste -sd,)
  # srun would also use the other nodes with which the job started.
  step=("$REPO_DIR/launch/slurm/step.sh" "$*" --nodes="$#" ${others:+--exclude="$others"} "${step_options[@]}")
}

# Does a step start on these nodes (nodes), and does each see the repository? Otherwise sets step_problem.
slurm::check_nodes() {
  local -r not_seen=9
  local -a of=("${@:-${nodes[@]}}")
  local output status=0
  slurm::step "${of[@]}"
  # shellcheck disable=SC2016 # $1 belongs to the inner shell
  output=$("${step[@]}" --mpi=none --ntasks="${#of[@]}" --ntasks-per-node=1 \
    bash -c 'node=${SLURMD_NODENAME:-a node}; [[ -x $1/launch/run/rank.sh ]] && echo "answer $node" || { echo "$node" && exit "$2"; }' \
    - "$REPO_DIR" "$not_seen" 2>&1) || status=$?
  if ((status == 0 && $(grep -c '^answer ' <<<"$output") >= ${#of[@]})); then return 0; fi
  if ((status == not_seen)); then
    step_problem="$(grep -v -m 1 '^answer \|^srun: ' <<<"$output") does not see $REPO_DIR: put the repository on storage that all nodes share"
  else
    # shellcheck disable=SC2034 # for other parts
    step_problem="GPU_GRES=${GPU_GRES:-gpu}: a step with ${step[*]:2} does not start: $(answers::why "$output")"
  fi
  return 1
}

# The ranks find each other by MASTER_ADDR, so `none` is enough; it replaces another SLURM_MPI_TYPE that starts no step: srun also
# lists types whose library is missing.
slurm::mpi_type() {
  local -r wanted=${SLURM_MPI_TYPE:-none}
  if [[ $wanted == none ]] || [[ $("${step[@]}" --mpi="$wanted" --nodes=1 --ntasks=1 echo started 2>/dev/null) == *started* ]]; then
    echo "$wanted"
  else
    log::warn "SLURM_MPI_TYPE=$wanted does not start a step (is its library on every node?): using none"
    echo none
  fi
}

# Address of the first node, as seen by the other nodes: rank 0 listens there.
slurm::master_address() {
  local address ip
  address=$(scontrol show node "${nodes[0]}" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')
  address=${address:-${nodes[0]}}
  ip=$(getent ahostsv4 "$address" | awk 'NR == 1 { print $1 }') || true
  # /etc/hosts of many systems gives a node's own name a loopback address, which no other node can use.
  if [[ -z $ip || ($ip == 127.* && $DGXNNODES -gt 1) ]]; then echo "$address"; else echo "$ip"; fi
}

# Name of the run's folder; a requeued job finds its earlier one.
slurm::run_name() {
  local folder
  if ((${SLURM_RESTART_COUNT:-0})); then
    for folder in "$LOGDIR/${DGXSYSTEM}"_*_"$SLURM_JOB_ID"{,_rehearsal}; do
      if [[ -d $folder ]]; then basename -- "$folder" && return; fi
    done
  fi
  echo "${DGXSYSTEM}_$(date +%Y%m%d-%H%M%S)_${SLURM_JOB_ID:-}"
}

# Sets how long the ranks may take to end: Slurm kills this script too, KillWait seconds after its first signal, and the last
# line must be printed before. Argument: Slurm's configuration.
slurm::shutdown_seconds() {
  local -r kill_wait=$(sed -n 's/^KillWait *= *\([0-9]*\).*/\1/p' <<<"$1")
  shutdown_seconds=$((${kill_wait:-30} * 2 / 3))
}

# At SIGUSR1: the ranks get the remaining time, at most ten minutes, minus 30 seconds for the rest.
slurm::time_limit_near() {
  local -r left=$(($(slurm::ask left) - 30))
  if ((left > shutdown_seconds)); then shutdown_seconds=$((left < 600 ? left : 600)); fi
  trial::interrupted USR1
}

# Reports nodes that are lost.
platform::blame() { slurm::ask lost "${nodes[@]}" >>"$ATTEMPT_STATUS"; }

platform::blame_by_output() { slurm::ask aborted "${nodes[@]}" >>"$ATTEMPT_STATUS"; }

# Why the job ends, in words. Argument: the signal that this script got.
platform::why() { slurm::ask why "$1" "${nodes[@]}" || echo "interrupted by SIG$1"; }
