#!/usr/bin/env bash
# Slurm with pyxis and enroot, by the interface of container.sh: one named container per node, created by the first step, which
# gives the image, and found by name in all others. The array srun begins every step. cleanup.sh removes the containers.
# shellcheck source=launch/state.sh
source "$REPO_DIR/launch/state.sh"
# shellcheck disable=SC2034 # for other parts
runtime_platforms=(slurm) runtime_default_on=(slurm)

# Differs after a requeue and in each attempt, since the previous container of this job may be half removed.
CONTAINER_NAME=${ATTEMPT_NAME:-bert}
pyxis_help=''                   # not declared: this file is sourced in a function
PYXIS_INSIDE=/media/mlperf_bert # a folder that only containers have

container::check() {
  pyxis_help=$(srun --help 2>&1) || true
  [[ $pyxis_help == *--container-image* && $pyxis_help == *--container-name* ]] ||
    log::die "CONTAINER_RUNTIME=pyxis: srun has no option --container-image$(pyxis::plugin_error "$pyxis_help"):" \
      "install pyxis, use CONTAINER_RUNTIME=apptainer, or CONT='' to run directly on the nodes"
  case $CONT in
    /* | ./* | ../* | *.sqsh)
      CONT=$(realpath -m -- "$CONT") # pyxis recognizes a file only by a leading slash or dot
      [[ -r $CONT ]] ||
        log::die "CONT=$CONT: no such image: enroot import -o $CONT dockerd://mlperf-bert, on storage that all nodes share"
      ;;
    *.sif) log::die "CONT=$CONT: an Apptainer image: set CONTAINER_RUNTIME=apptainer, or give an enroot image (.sqsh)" ;;
    dockerd://* | podman://*)
      log::die "CONT=$CONT: only this node has it: enroot import -o mlperf-bert.sqsh $CONT, and CONT=that file"
      ;;
    *) CONT=$(pyxis::registry_image "${CONT#docker://}") ;;
  esac
  export CONT
}

# enroot writes REGISTRY#IMAGE where docker writes REGISTRY/IMAGE.
pyxis::registry_image() {
  local -r registry=${1%%/*}
  if [[ $1 == */* && $1 != *'#'* && $registry == *[.:]* ]]; then echo "$registry#${1#*/}"; else echo "$1"; fi
}

container::create() {
  log::info "container $CONTAINER_NAME from $CONT on each node"
  container::arguments
  # An import takes minutes: shows pyxis' output meanwhile.
  answers::streamed "${srun[@]}" --ntasks="$DGXNNODES" --ntasks-per-node=1 --container-image="$CONT" "${container[@]}" \
    "$REPO_DIR/launch/node/run_and_answer.sh" true || true
  answers::complete "$answers_output" ||
    answers::die "CONT=$CONT: its container could not be created on every node" "$answers_output" "$(pyxis::reason "$answers_output")"
}

container::arguments() {
  container::mounts
  local list
  printf -v list ',%s' "${mounts[@]}" "$REPO_DIR/launch/node:$PYXIS_INSIDE:ro"
  # Home is not mounted: packages of ~/.local would come before the image's.
  container=(--container-name="$CONTAINER_NAME" --container-mounts="${list#,}" --no-container-mount-home --container-remap-root)
  if [[ $pyxis_help == *--container-writable* ]]; then container+=(--container-writable); fi
  container+=("$PYXIS_INSIDE/inside.sh") # the command's first word
}

container::remove() { :; }

# pyxis prefixes the name with pyxis_ or, if containers end with their job, with pyxis_JOB_; old versions add nothing.
container::on_node_list() { if command -v enroot >/dev/null; then pyxis::enroot list; fi; }
container::on_node_remove() { pyxis::enroot remove --force -- "$1"; }

# pyxis passes none of these to enroot, so a user's ENROOT_DATA_PATH is not the folder of the containers.
pyxis::enroot() {
  env -u ENROOT_LIBRARY_PATH -u ENROOT_SYSCONF_PATH -u ENROOT_RUNTIME_PATH -u ENROOT_CACHE_PATH -u ENROOT_DATA_PATH \
    -u ENROOT_TEMP_PATH enroot "$@"
}

# srun's error about a plugin that it cannot load, in parentheses; empty without one.
pyxis::plugin_error() {
  local -r output=$(grep -iE 'error: .*(plugin|plugstack|spank|dlopen)' <<<"$1" | sed -n '1s/.*error: *//p')
  if [[ $output ]]; then printf ' (%s)' "$output"; fi
}

# The line that best explains why pyxis failed: from a program that enroot runs, else enroot's error, else pyxis', else any
# step's.
pyxis::reason() {
  local -r cause='FATAL ERROR|curl: \([0-9]+\)|No space left on device'
  local reason
  if grep -q "execve(): $PYXIS_INSIDE/" <<<"$1"; then
    answers::with_nodes "$1" "ran outside the container: its slurmd has not loaded pyxis (plugstack.conf, then restart slurmd)"
    return
  fi
  reason=$(
    grep -E -m 1 "$cause" <<<"$1" || grep -m 1 '\[ERROR\]' <<<"$1" ||
      grep 'error: .*pyxis: ' <<<"$1" | grep -m 1 -v 'child [0-9]* failed'
  ) || reason=$(answers::why "$1")
  reason=${reason##*pyxis:}
  answers::with_nodes "$1" "${reason#"${reason%%[![:space:]]*}"}"
}

container::doctor() {
  local output
  # The run's own check and message, which has not run anything yet.
  if output=$(container::check 2>&1 >/dev/null); then
    pyxis::doctor_runs
  else
    doctor::row fail pyxis "${output##*run: error: }"
  fi
}

# Does srun know pyxis?
container::doctor_platform() {
  local -r help=$(srun --help 2>&1)
  local option missing=''
  for option in container-image container-name container-mounts no-container-mount-home container-remap-root; do
    if [[ $help != *"--$option"* ]]; then missing+=" --$option"; fi
  done
  if [[ $help != *--container-image* ]]; then
    local -r broken=$(pyxis::plugin_error "$help")
    if [[ $broken ]]; then
      doctor::row fail pyxis "srun cannot load a plugin$broken" 'correct plugstack.conf, or install what it names'
    elif [[ -n ${CONT:-} && ${CONTAINER_RUNTIME:-pyxis} == pyxis ]]; then
      doctor::row fail pyxis 'srun has no option --container-image, and CONT is set' \
        'install pyxis, or: export CONTAINER_RUNTIME=apptainer, or: export CONT='
    else
      doctor::row skip pyxis 'not installed; jobs run directly on the nodes'
    fi
  elif [[ $missing ]]; then
    doctor::row fail pyxis "srun lacks$missing" 'install pyxis 0.11 or newer'
  else
    doctor::row pass pyxis "$(dpkg-query --show nvslurm-plugin-pyxis 2>/dev/null || rpm -q nvslurm-plugin-pyxis 2>/dev/null |
      grep -v 'not installed' || echo 'installed')"
  fi
}

# Runs a command in a container of the image, on this node of a job or on any free node.
pyxis::doctor_runs() {
  local -a step=(srun --nodes=1 --ntasks=1)
  local output where='a node of the partition'
  if [[ ${SLURM_JOB_ID:-} ]]; then
    where=${SLURMD_NODENAME:-this job}
    step+=(--overlap ${SLURMD_NODENAME:+"--nodelist=$SLURMD_NODENAME"})
    unset SLURM_NTASKS SLURM_NPROCS SLURM_NTASKS_PER_NODE SLURM_TASKS_PER_NODE SLURM_NNODES SLURM_JOB_NUM_NODES
  else
    step+=(--immediate=60)
  fi
  # shellcheck disable=SC2016 # of the inner shell
  output=$("${step[@]}" --container-image="$(pyxis::image)" --no-container-mount-home \
    --container-mounts="$REPO_DIR/launch/node:$PYXIS_INSIDE:ro" \
    "$PYXIS_INSIDE/inside.sh" bash -c 'echo "answer ${SLURMD_NODENAME:-node}"' 2>&1 </dev/null)
  if grep -q '^answer ' <<<"$output"; then
    doctor::row pass pyxis "a container of $CONT ran on $(sed -n 's/^answer //p' <<<"$output")"
  elif [[ $output == *'Unable to allocate resources'* || $output == *'Immediate'* ]]; then
    doctor::row skip pyxis "not tried: no node was free within a minute ($(answers::reason "$output"))" 'try again later: launch/doctor.sh container'
  else
    doctor::row fail pyxis "$CONT does not run on $where: $(DGXNNODES=1 pyxis::reason "$output")" \
      'there: enroot list; sysctl user.max_user_namespaces kernel.unprivileged_userns_clone (1) kernel.apparmor_restrict_unprivileged_userns (0)'
  fi
}

pyxis::image() (
  container::check >/dev/null 2>&1
  echo "$CONT"
)
