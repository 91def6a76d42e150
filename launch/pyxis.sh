#!/usr/bin/env bash
# Slurm with pyxis and enroot, by the interface of container.sh: one named container a node, made by the first step that
# names the image and found by its name in all others. Sourced by run.sub, whose array srun begins every step.
# shellcheck disable=SC2154 # mounts and srun are of container.sh and slurm.sh

# Not the name of an earlier start of this job, whose container may be half removed.
PYXIS_NAME=bert_${SLURM_JOB_ID:-}_${SLURM_RESTART_COUNT:-0}
readonly PYXIS_NAME
pyxis_guard='' pyxis_guard_input='' pyxis_help='' # not declared: this file is sourced in a function

container::check() {
  pyxis_help=$(srun --help 2>&1) || true
  [[ $pyxis_help == *--container-image* && $pyxis_help == *--container-name* ]] ||
    log::die 'CONTAINER_RUNTIME=pyxis: srun has no option --container-image: install pyxis,' \
      "take CONTAINER_RUNTIME=apptainer, or CONT='' to run straight on the nodes"
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

container::create() {
  local line said=''
  pyxis::start_guard
  log::info "container $PYXIS_NAME from $CONT on each node"
  container::arguments
  # An import takes minutes: what pyxis says of it is shown as it comes.
  while IFS= read -r line; do
    if [[ $line == 'status '* ]]; then break; fi
    printf '%s\n' "$line" >&2
    said+=$line$'\n'
  done < <(
    status=0
    "${srun[@]}" --ntasks="$DGXNNODES" --ntasks-per-node=1 --container-image="$CONT" "${container[@]}" true 2>&1 || status=$?
    echo "status $status"
  )
  [[ $line == 'status 0' ]] ||
    log::die "CONT=$CONT: its container could not be made on every node: $(pyxis::reason "$said")"
}

# The line that says most of why pyxis failed: enroot's error, else pyxis's own, else the last.
pyxis::reason() {
  {
    grep -m 1 'pyxis: .*\[ERROR\]' <<<"$1" || grep 'error: .*pyxis: ' <<<"$1" | grep -m 1 -v 'child [0-9]* failed' ||
      tail -n 1 <<<"${1%$'\n'}"
  } | sed 's/.*pyxis: *//'
}

container::arguments() {
  container::mounts
  local -a binds=()
  local mount
  for mount in "${mounts[@]}"; do binds+=("${mount%:*}:$mount"); done
  printf -v mount ',%s' "${binds[@]}"
  # Home stays outside: packages of ~/.local would come before the image's.
  container=(--container-name="$PYXIS_NAME" --container-mounts="${mount#,}" --no-container-mount-home --container-remap-root)
  if [[ $pyxis_help == *--container-writable* ]]; then container+=(--container-writable); fi
}

# A named container outlives its steps and, as pyxis is configured by default, its job. So a guard waits on every node,
# outside the container: when its input ends, with this script or by container::remove, or when Slurm ends the job (scancel,
# requeue, time limit), it removes the container. After the latter no step could be started to do it.
pyxis::start_guard() {
  if ! "${srun[@]}" --overlap --nodes=1 --ntasks=1 true 2>/dev/null; then
    log::warn "no step can run beside another (srun --overlap): container $PYXIS_NAME stays on the nodes after the job"
    return 0
  fi
  exec {pyxis_guard_input}> >(exec "${srun[@]}" --gres=none --input=all --overlap --ntasks="$DGXNNODES" \
    --ntasks-per-node=1 "$REPO_DIR/launch/pyxis_guard.sh" "$PYXIS_NAME" >/dev/null 2>&1)
  pyxis_guard=$!
}

container::remove() {
  if [[ -z $pyxis_guard ]]; then return 0; fi
  exec {pyxis_guard_input}>&-
  wait "$pyxis_guard" || true
  pyxis_guard=''
}
