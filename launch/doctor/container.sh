#!/usr/bin/env bash
# doctor: the container runtime and the image. Sourced by doctor.sh.
# shellcheck disable=SC2154
# shellcheck source=launch/doctor/pyxis.sh
source "$REPO_DIR/launch/doctor/pyxis.sh"

readonly ENROOT_CONF=${ENROOT_CONF:-/etc/enroot/enroot.conf}

doctor::container() {
  local runtime=docker output
  if command -v sbatch >/dev/null; then runtime=pyxis; fi
  if [[ -z ${CONT:-} ]]; then
    doctor::row skip container 'CONT is empty: runs use the Python environment of the machine'
    return
  fi
  runtime=${CONTAINER_RUNTIME:-$runtime}
  if [[ $runtime == pyxis ]]; then
    doctor::user_namespaces
    doctor::enroot
    doctor::sqsh
  fi
  # The run's own check and message; passing it with pyxis has not run anything yet.
  if [[ $runtime != pyxis ]]; then
    doctor::run_check "$runtime" "runs $CONT" doctor::runtime_check "$runtime"
  elif output=$(doctor::runtime_check "$runtime" 2>&1 >/dev/null); then
    doctor::pyxis_runs
  else
    doctor::row fail pyxis "${output##*run: error: }"
  fi
}

# Docker and Apptainer start a container here.
doctor::runtime_check() (
  # shellcheck disable=SC2329 # the runtime's file calls it
  runner::everywhere() { "$@"; }
  # shellcheck disable=SC2034 # for answers.sh
  DGXNNODES=1
  container::load "$1"
  container::check
  if [[ $CONTAINER_RUNTIME != pyxis ]]; then container::create; fi
)

doctor::enroot() {
  local output path variable free
  if ! command -v enroot >/dev/null; then
    if doctor::on_compute_node; then
      doctor::row fail enroot 'not on PATH' 'install enroot on every node'
    else
      doctor::row skip enroot 'not on this machine; only compute nodes need it' 'srun launch/doctor.sh container'
    fi
    return
  fi
  if ! output=$(enroot list 2>&1); then
    doctor::row fail enroot "enroot list: ${output##*$'\n'}" "ENROOT_DATA_PATH and ENROOT_RUNTIME_PATH in $ENROOT_CONF: folders this user can write"
    return
  fi
  doctor::row pass enroot "version $(enroot version)"
  for variable in ENROOT_DATA_PATH ENROOT_CACHE_PATH ENROOT_RUNTIME_PATH; do
    path=$(doctor::enroot_path "$variable")
    [[ $path ]] || continue
    free=$(doctor::free_gb "$path")
    if [[ ! $free ]]; then
      doctor::row fail "$variable" "$path: no such folder, and no parent of it" "in $ENROOT_CONF: another folder"
    elif [[ $variable != ENROOT_DATA_PATH ]] || ((free >= 60)); then
      doctor::row pass "$variable" "$path, $free GB free"
    else
      doctor::row warn "$variable" "$path has $free GB free, and an unpacked image takes about 40" "in $ENROOT_CONF: a larger disk"
    fi
  done
}

# A path of enroot's settings: from the environment, or from its file with the usual variables resolved.
# shellcheck disable=SC2016 # searched for literally
doctor::enroot_path() {
  local -r name=$1
  local path=${!name:-}
  if [[ ! $path && -r $ENROOT_CONF ]]; then path=$(sed -n "s/^[[:space:]]*${name}[[:space:]]\{1,\}//p" "$ENROOT_CONF" | tail -n 1); fi
  path=${path//'$(id -u)'/$(id -u)}
  path=${path//'${UID}'/$(id -u)}
  path=${path//'${USER}'/$(id -un)}
  path=${path//'${HOME}'/$HOME}
  if [[ $path != *'$'* ]]; then echo "$path"; fi
}

doctor::sqsh() {
  [[ $CONT == *.sqsh && -r $CONT ]] || return 0
  if [[ $(head -c 4 "$CONT") == hsqs ]]; then
    doctor::row pass image "$CONT, $(($(stat -Lc %s "$CONT") >> 30)) GB"
  else
    doctor::row fail image "$CONT is not a squashfs image" "enroot import -o $CONT dockerd://mlperf-bert"
  fi
}
