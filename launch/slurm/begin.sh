#!/usr/bin/env bash
# The beginning of a job script (run.sub, certify.sub), which has found the repository: loads the launcher, and refuses what this job
# cannot be before anything else fails because of it. Sourced.
REPO_DIR=$(cd -- "$REPO_DIR" && pwd -P)
readonly REPO_DIR
# shellcheck source=launch/load.sh
source "$REPO_DIR/launch/load.sh" supervisor run/certify

begin::refuse() {
  local output image=SLURM_SPANK__SLURM_SPANK_OPTION_pyxis_container_image
  if [[ ! ${SLURM_JOB_ID:-} ]]; then return 0; fi # which the scripts themselves say, with their nodes
  [[ ! ${SLURM_HET_SIZE:-} ]] || log::die "job $SLURM_JOB_ID is heterogeneous (sbatch ... : ...): submit one component, of equal nodes"
  [[ ! ${!image:-}${SLURM_CONTAINER:-} ]] ||
    log::die "sbatch started this script in the container ${!image:-$SLURM_CONTAINER}: submit without that option;" \
      "CONT=${!image:-IMAGE} has the ranks run in it"
  output=$(scontrol show hostnames "${SLURM_JOB_NODELIST:-}" 2>&1) ||
    log::die "scontrol does not work on $(uname -n), the first node of the job: ${output##*$'\n'}"
}

begin::refuse
