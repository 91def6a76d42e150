#!/usr/bin/env bash
# Slurm with pyxis and enroot, by the interface of container.sh: one named container a node, made by the first step that
# names the image and found by its name in all others. Sourced by run.sub, whose array srun begins every step. The guard of
# the nodes (cleanup.sh guard) removes the containers.
# shellcheck disable=SC2154 # mounts and srun are of container.sh and runner.sh
# shellcheck source=launch/container/pyxis_errors.sh
source "$REPO_DIR/launch/container/pyxis_errors.sh"

# Not the name of an earlier start of this job, whose container may be half removed.
export PYXIS_NAME=bert_${SLURM_JOB_ID:-}_${SLURM_RESTART_COUNT:-0}
readonly PYXIS_NAME
pyxis_help='' # not declared: this file is sourced in a function

container::check() {
  pyxis_help=$(srun --help 2>&1) || true
  [[ $pyxis_help == *--container-image* && $pyxis_help == *--container-name* ]] ||
    log::die "CONTAINER_RUNTIME=pyxis: srun has no option --container-image$(pyxis::plugin_error "$pyxis_help"):" \
      "install pyxis, take CONTAINER_RUNTIME=apptainer, or CONT='' to run straight on the nodes"
  case $CONT in
    /* | ./* | ../* | *.sqsh)
      CONT=$(realpath -m -- "$CONT") # pyxis takes it for a file only when it begins with a slash or a dot
      [[ -r $CONT ]] ||
        log::die "CONT=$CONT: no such image: enroot import -o $CONT dockerd://mlperf-bert, on storage of all nodes"
      ;;
    *.sif) log::die "CONT=$CONT: an image of Apptainer: set CONTAINER_RUNTIME=apptainer, or give an enroot image (.sqsh)" ;;
    dockerd://* | podman://*)
      log::die "CONT=$CONT: only this node has it: enroot import -o mlperf-bert.sqsh $CONT, and CONT=that file"
      ;;
    *) CONT=$(pyxis::registry_image "${CONT#docker://}") ;;
  esac
  export CONT
}

# enroot wants REGISTRY#IMAGE where docker has REGISTRY/IMAGE.
pyxis::registry_image() {
  local -r registry=${1%%/*}
  if [[ $1 == */* && $1 != *'#'* && $registry == *[.:]* ]]; then echo "$registry#${1#*/}"; else echo "$1"; fi
}

# CONT_FILE: the image, imported by one node into a file that all nodes read.
pyxis::import() {
  local -r image=$CONT
  if [[ ! ${CONT_FILE:-} ]]; then return 0; fi
  [[ $CONT != /* ]] || log::die "CONT_FILE is for an image of a registry, and CONT=$CONT is a file: unset CONT_FILE"
  CONT=$(realpath -m -- "$CONT_FILE")
  log::info "image $image in $CONT"
  answers::shown "${srun[@]}" --overlap --nodes=1 --ntasks=1 "$REPO_DIR/launch/run/answer.sh" \
    "$REPO_DIR/launch/container/import_image.sh" "$image" "$CONT" || true
  grep -q '^answer ' <<<"$answers_said" ||
    log::die "CONT=$image: not imported: $(pyxis::reason "$answers_said")"
}

container::create() {
  pyxis::import
  log::info "container $PYXIS_NAME from $CONT on each node"
  container::arguments
  # An import takes minutes: what pyxis says of it is shown as it comes.
  answers::shown "${srun[@]}" --ntasks="$DGXNNODES" --ntasks-per-node=1 --container-image="$CONT" "${container[@]}" \
    "$REPO_DIR/launch/run/answer.sh" true || true
  answers::complete "$answers_said" ||
    log::die "CONT=$CONT: its container could not be made on every node: $(pyxis::reason "$answers_said")"
}

container::arguments() {
  container::mounts
  local list
  printf -v list ',%s' "${mounts[@]}"
  # Home stays outside: packages of ~/.local would come before the image's.
  container=(--container-name="$PYXIS_NAME" --container-mounts="${list#,}" --no-container-mount-home --container-remap-root)
  if [[ $pyxis_help == *--container-writable* ]]; then container+=(--container-writable); fi
}

container::remove() { :; }
