#!/usr/bin/env bash
# Slurm: is this allocation the one the config wants, and how are its steps started? Sourced by run.sub.

slurm::check() {
  [[ -n ${SLURM_JOB_ID:-} ]] ||
    log::die "run.sub runs in a Slurm job: sbatch -N $DGXNNODES run.sub; without Slurm, ./run_local.sh"
  ((SLURM_JOB_NUM_NODES == DGXNNODES)) ||
    log::die "this job has $SLURM_JOB_NUM_NODES nodes and the config wants $DGXNNODES: sbatch -N $DGXNNODES run.sub"
  if [[ ${DEVICE:-auto} == cpu ]]; then return 0; fi
  if [[ -z ${SLURM_GPUS_ON_NODE:-} ]]; then
    # Without gres in Slurm every job sees all GPUs. With it, this one sees none and would train on CPUs.
    ! grep -q ' Gres=[^ ]*gpu' <<<"$(scontrol --oneliner show node "${SLURMD_NODENAME:-}" 2>/dev/null)" ||
      log::die "this job has no GPUs: sbatch --gres=${GPU_GRES:-gpu}:$DGXNGPU run.sub (or export SBATCH_GRES);" \
        'on CPUs, DEVICE=cpu'
    return 0
  fi
  ((SLURM_GPUS_ON_NODE >= DGXNGPU)) ||
    log::die "this job has $SLURM_GPUS_ON_NODE GPUs a node and the config wants DGXNGPU=$DGXNGPU:" \
      'sbatch --exclusive, or another config'
}

# Sets the array srun: the command that all steps of this job begin with. Starts one step to see that such steps start.
slurm::srun_command() {
  local -r gres=${GPU_GRES:-gpu} config=$(scontrol show config)
  # What sbatch was given for tasks and GPUs would otherwise hold for each step too, besides or against what is asked here.
  unset SLURM_NTASKS SLURM_NPROCS SLURM_NTASKS_PER_NODE SLURM_TASKS_PER_NODE SLURM_CPUS_PER_TASK SLURM_DISTRIBUTION \
    SLURM_CPU_BIND SLURM_GPUS SLURM_GPUS_PER_NODE SLURM_GPUS_PER_TASK SLURM_GPU_BIND SLURM_GRES SLURM_TRES_PER_TASK
  srun=(srun --distribution=block --input=none)
  # Slurm's own binding knows nothing of GPUs; run_and_time.sh binds.
  if grep -q '^TaskPlugin.*affinity' <<<"$config"; then srun+=(--cpu-bind=none); fi
  # A step that does not ask for GPUs gets none, even in a job that has them all.
  if [[ ${DEVICE:-auto} != cpu && $gres != none && -n ${SLURM_GPUS_ON_NODE:-} ]]; then srun+=(--gres="$gres:$DGXNGPU"); fi
  slurm::patience "$config"
  slurm::check_nodes
  srun+=(--mpi="$(slurm::mpi_type)")
}

# One step on every node: do steps start as asked, and does each node see the repository?
slurm::check_nodes() {
  local -r blind=9
  local said status=0
  # shellcheck disable=SC2016 # $1 belongs to the inner shell
  said=$("${srun[@]}" --mpi=none --ntasks="$DGXNNODES" --ntasks-per-node=1 \
    bash -c 'node=${SLURMD_NODENAME:-a node}; [[ -x $1/launch/rank.sh ]] && echo "answer $node" || { echo "$node" && exit "$2"; }' \
    - "$REPO_DIR" "$blind" 2>&1) || status=$?
  if ((status == blind)); then
    log::die "$(grep -v -m 1 '^answer \|^srun: ' <<<"$said") does not see $REPO_DIR: put the repository on storage that all nodes share"
  fi
  if ((status == 0)) && answers::complete "$said"; then return; fi
  log::die "GPU_GRES=${GPU_GRES:-gpu}: a step with ${srun[*]:1} does not start: $(answers::why "$said")"
}

# Does a step with these options of srun start?
slurm::starts() { [[ $("$@" echo started 2>/dev/null) == *started* ]]; }

# The ranks find each other by MASTER_ADDR, so none is enough; where a site wants another, the nearest one that works:
# srun also lists types whose library is missing.
slurm::mpi_type() {
  local -r wanted=${SLURM_MPI_TYPE:-none} known=" $(srun --mpi=list 2>&1 | tr -s '[:space:]' ' ') "
  local type why='is not in srun --mpi=list'
  for type in "$wanted" pmi2 none; do
    if [[ $type == none ]]; then break; fi
    [[ $known == *" $type "* ]] || continue
    slurm::starts srun --mpi="$type" --nodes=1 --ntasks=1 && break
    if [[ $type == "$wanted" ]]; then why='does not start a step (is its library on every node?)'; fi
  done
  [[ $type == "$wanted" ]] || log::warn "SLURM_MPI_TYPE=$wanted $why: using $type"
  echo "$type"
}

# Address of the first node, as the other nodes reach it: where rank 0 listens.
slurm::master_address() {
  local node address ip
  node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p) # head would end scontrol, and with it the job
  address=$(scontrol show node "$node" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')
  address=${address:-$node}
  ip=$(getent ahostsv4 "$address" | awk 'NR == 1 { print $1 }') || true
  # /etc/hosts of many systems gives a node's own name a loopback address, which no other node can use.
  if [[ -z $ip || ($ip == 127.* && $DGXNNODES -gt 1) ]]; then echo "$address"; else echo "$ip"; fi
}

# Name of the run's folder: a requeued job finds the one it began with.
slurm::run_name() {
  local folder
  if ((${SLURM_RESTART_COUNT:-0})); then
    for folder in "$LOGDIR/${DGXSYSTEM}"_*_"$SLURM_JOB_ID"; do
      if [[ -d $folder ]]; then basename -- "$folder" && return; fi
    done
  fi
  echo "${DGXSYSTEM}_${DATESTAMP:-$(date +%Y%m%d-%H%M%S)}_$SLURM_JOB_ID"
}
