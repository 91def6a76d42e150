#!/usr/bin/env bash
# doctor: CPUs, memory, network, Python and disk of this machine. Sourced by doctor.sh.

readonly SYSFS=${SYSFS:-/sys}

doctor::machine() {
  doctor::cpus
  doctor::limits
  doctor::infiniband
  doctor::drop_caches
  doctor::results
  if doctor::on_compute_node; then doctor::python; fi
}

# The binding leaves out CPUs that the cluster reserves (WekaIO, system cores).
doctor::cpus() {
  local -r allowed=$(topology::allowed | wc -l)
  local -r online=$(topology::expand "$(cat "$SYSFS/devices/system/cpu/online")" | wc -l)
  local -r nodes=$(find "$SYSFS/devices/system/node" -maxdepth 1 -name 'node[0-9]*' 2>/dev/null | wc -l)
  local text="$allowed of $online CPUs on $nodes NUMA nodes"
  if ((allowed < online)); then text+=", $((online - allowed)) reserved"; fi
  if ((allowed < 2 * ${DGXNGPU:-1})); then
    doctor::row warn CPUs "$text: under 2 for each of ${DGXNGPU:-1} ranks" 'ask for more CPUs: sbatch --exclusive'
  else
    doctor::row pass CPUs "$text"
  fi
}

doctor::limits() {
  local -r memlock=$(ulimit -l) shm=$(doctor::free_gb /dev/shm)
  if [[ $memlock != unlimited && -d $SYSFS/class/infiniband ]]; then
    doctor::row fail memlock "$memlock KB: InfiniBand cannot pin its buffers" \
      "in /etc/security/limits.d: '* - memlock unlimited'; for Slurm: PropagateResourceLimitsExcept=MEMLOCK"
  else
    doctor::row pass memlock "$memlock"
  fi
  if ((${shm:-0} < 1)); then doctor::row warn /dev/shm "${shm:-no} GB free, which NCCL uses within a node" 'mount -o remount,size=16G /dev/shm'; fi
}

doctor::infiniband() {
  local -r ports=$(cat "$SYSFS"/class/infiniband/*/ports/*/state 2>/dev/null)
  local -r active=$(grep -c ACTIVE <<<"$ports")
  if [[ ! $ports ]]; then
    doctor::row skip InfiniBand 'none: nodes communicate over Ethernet'
  elif ((active == 0)); then
    doctor::row warn InfiniBand "none of $(wc -l <<<"$ports") ports is active" 'ibstat; is the subnet manager running?'
  else
    doctor::row pass InfiniBand "$active of $(wc -l <<<"$ports") ports active"
  fi
}

# Could the page caches be dropped? Does not drop them.
doctor::drop_caches() {
  local -ra command=(sudo -n /sbin/sysctl -q vm.drop_caches=3) # as node/drop_caches.sh
  if [[ -w $PROC_SYS/vm/drop_caches ]]; then
    doctor::row pass 'drop caches' 'as this user'
  elif sudo -n -l "${command[@]:2}" >/dev/null 2>&1; then
    doctor::row pass 'drop caches' "${command[*]}"
  else
    doctor::row "$([[ ${CLEAR_CACHES:-1} == require ]] && echo fail || echo warn)" 'drop caches' \
      "'${command[*]}' is not allowed: a closed run on GPUs does not start" \
      "visudo: $(id -un) ALL=(root) NOPASSWD: ${command[*]:2}"
  fi
}

doctor::results() {
  local -r folder=$(doctor::existing "${LOGDIR:-results}") free=$(doctor::free_gb "${LOGDIR:-results}")
  if [[ ! -w $folder ]]; then
    doctor::row fail LOGDIR "${LOGDIR:-results}: $folder cannot be written" 'in env.sh: export LOGDIR=<a folder of yours>'
  else
    doctor::row "$( ((free < 1)) && echo fail || echo pass)" LOGDIR "${LOGDIR:-results}, $free GB free"
  fi
}

doctor::python() {
  local output
  if [[ -n ${CONT:-} ]]; then
    doctor::row skip Python 'in the container'
  elif output=$("$PYTHON" -c 'import torch, h5py, mlperf_logging; print("torch", torch.__version__)' 2>&1); then
    doctor::row pass Python "$PYTHON: $output"
  else
    doctor::row fail Python "$PYTHON: ${output##*$'\n'}" "make setup, and export PYTHON=$REPO_DIR/.venv/bin/python"
  fi
}
