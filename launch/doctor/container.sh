#!/usr/bin/env bash
# doctor: the container runtime and the image. Sourced by doctor.sh.

doctor::container() {
  local platform=local runtime file
  if command -v sbatch >/dev/null; then platform=slurm; fi
  if [[ -z ${CONT:-} ]]; then
    doctor::row skip container 'CONT is empty: runs use the Python environment of the machine'
    return
  fi
  runtime=${CONTAINER_RUNTIME:-$(container::runtimes "$platform")}
  file=$REPO_DIR/launch/container/runtimes/$runtime.sh
  if [[ -r $file ]] && container::defines "$file" container::doctor; then
    # shellcheck source=/dev/null
    source "$file"
    container::doctor
  else
    doctor::run_check "$runtime" "runs $CONT" doctor::runtime_check "$runtime"
  fi
}

# The run's own check and message; a container is started here.
doctor::runtime_check() (
  # shellcheck disable=SC2329 # the runtime's file calls it
  runner::everywhere() { "$@"; }
  # shellcheck disable=SC2034 # for answers.sh
  DGXNNODES=1
  CONTAINER_RUNTIME=$1
  # shellcheck disable=SC2046 # words
  variables::one_of CONTAINER_RUNTIME $(container::runtimes)
  container::paths
  # shellcheck source=/dev/null
  source "$REPO_DIR/launch/container/runtimes/$1.sh"
  container::check
  container::create
)
