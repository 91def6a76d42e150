#!/usr/bin/env bash
# Slurm with pyxis and enroot, by the interface of container.sh: one named container per node, created by the first step, which
# gives the image, and found by name in all others. The array srun begins every step. cleanup.sh removes the containers.
# shellcheck source=launch/state.sh
source "$REPO_DIR/launch/state.sh"
# shellcheck disable=SC2034 # for other parts
runtime_platforms=(slurm) runtime_default_on=(slurm)

# Differs after a requeue and in each attempt, since the previous container of this job may be half removed.
CONTAINER_NAME=${ATTEMPT_NAME:-}
pyxis_help=''                   # not declared: this file is sourced in a function
PYXIS_INSIDE=/media/mlperf_bert # a folder that only containers have
# Lines that explain why pyxis failed, the best first: of a program that enroot runs, of enroot, of pyxis.
pyxis_causes=("execve\(\): $PYXIS_INSIDE/=>ran outside the container: its slurmd has not loaded pyxis (plugstack.conf, then restart slurmd)"
  '(?:.*pyxis:)?\s*(.*(?:FATAL ERROR|curl: \(\d+\)|No space left on device).*)' '(?:.*pyxis:)?\s*(.*\[ERROR\].*)'
  'error: .*pyxis: *(?!child \d* failed)(\S.*)')

container::check() {
  local option
  pyxis_help=$(srun --help 2>&1) || true
  for option in container-image container-name container-mounts no-container-mount-home container-remap-root; do
    [[ $pyxis_help == *"--$option"* ]] ||
      log::die "CONTAINER_RUNTIME=pyxis: srun has no option --$option$(pyxis::plugin_error "$pyxis_help"):" \
        "install pyxis 0.11 or newer, use CONTAINER_RUNTIME=apptainer, or CONT='' to run directly on the nodes"
  done
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
    answers::die "CONT=$CONT: its container could not be created on every node" "$answers_output" "${pyxis_causes[@]}"
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
