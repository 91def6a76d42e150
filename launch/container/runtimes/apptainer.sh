#!/usr/bin/env bash
# Apptainer (or Singularity), by the interface of container.sh: each command runs in the image, which stays unchanged.
# Variables of the host pass through; the image's own win.
# shellcheck source=launch/state.sh
source "$REPO_DIR/launch/state.sh"

# shellcheck disable=SC2034 # for other parts
runtime_platforms=(slurm ssh local)
APPTAINER=apptainer
if ! command -v apptainer >/dev/null && command -v singularity >/dev/null; then APPTAINER=singularity; fi

container::check() {
  case $CONT in
    *://*) ;; # a registry's image is fetched and cached by the first command
    *.sqsh) log::die "CONT=$CONT: an enroot image; for Apptainer: apptainer build mlperf-bert.sif apptainer.def" ;;
    *) [[ -r $CONT ]] || log::die "CONT=$CONT: no such image: apptainer build $CONT apptainer.def" ;;
  esac
}

# Nothing to create: checks that every node can run the image.
container::create() {
  answers::run_on_all_nodes "$APPTAINER" exec "$CONT" true ||
    answers::die "CONT=$CONT: $APPTAINER cannot run it on every node" "$answers_output"
}

container::arguments() {
  local mount
  # The home folder is not mounted: packages of ~/.local would come before the image's.
  container=("$APPTAINER" exec --no-home --pwd "$REPO_DIR" --env PYTHONNOUSERSITE=1)
  if [[ ${DEVICE:-auto} != cpu ]]; then container+=(--nv); fi
  container::mounts
  for mount in "${mounts[@]}"; do container+=(--bind "$mount"); done
  container+=("$CONT")
}

container::remove() { :; }
