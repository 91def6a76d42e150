#!/usr/bin/env bash
# Slurm with pyxis and enroot, by the interface of container.sh: one named container per node, created by the first step, which
# gives the image, and found by name in all others. Sourced by run.sub, whose array srun begins every step. The node guard
# (cleanup.sh guard) removes the containers.
# shellcheck disable=SC2154 # mounts and srun are of container.sh and runner.sh
# shellcheck source=launch/container/pyxis_errors.sh
source "$REPO_DIR/launch/container/pyxis_errors.sh"

# Differs after a requeue, since the previous container of this job may be half removed.
export PYXIS_NAME=bert_${SLURM_JOB_ID:-}_${SLURM_RESTART_COUNT:-0}
readonly PYXIS_NAME
pyxis_help='' # not declared: this file is sourced in a function

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

# CONT_FILE: one node imports the image into a file that all nodes read.
pyxis::import() {
  local -r image=$CONT
  if [[ ! ${CONT_FILE:-} ]]; then return 0; fi
  [[ $CONT != /* ]] || log::die "CONT_FILE is for an image of a registry, and CONT=$CONT is a file: unset CONT_FILE"
  CONT=$(realpath -m -- "$CONT_FILE")
  log::info "image $image in $CONT"
  answers::streamed "${srun[@]}" --overlap --nodes=1 --ntasks=1 "$REPO_DIR/launch/run/answer.sh" \
    "$REPO_DIR/launch/container/import_image.sh" "$image" "$CONT" || true
  grep -q '^answer ' <<<"$answers_output" ||
    log::die "CONT=$image: not imported: $(pyxis::reason "$answers_output")"
}

container::create() {
  pyxis::import
  log::info "container $PYXIS_NAME from $CONT on each node"
  container::arguments
  # An import takes minutes: shows pyxis' output meanwhile.
  answers::streamed "${srun[@]}" --ntasks="$DGXNNODES" --ntasks-per-node=1 --container-image="$CONT" "${container[@]}" \
    "$REPO_DIR/launch/run/answer.sh" true || true
  answers::complete "$answers_output" ||
    log::die "CONT=$CONT: its container could not be created on every node: $(pyxis::reason "$answers_output")"
}

container::arguments() {
  container::mounts
  local list
  printf -v list ',%s' "${mounts[@]}"
  # Home is not mounted: packages of ~/.local would come before the image's.
  container=(--container-name="$PYXIS_NAME" --container-mounts="${list#,}" --no-container-mount-home --container-remap-root)
  if [[ $pyxis_help == *--container-writable* ]]; then container+=(--container-writable); fi
}

container::remove() { :; }
