#!/usr/bin/env bash
# What both test clusters need on this machine: Debian's packages of Slurm, and munge. Sourced by slurm_cluster.sh and slurm_nodes.sh.

# Installs what is missing.
slurm_daemons::packages() {
  if [[ -e /usr/include/slurm/spank.h ]] && command -v slurmctld slurmd srun munged gcc ip >/dev/null; then return; fi
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends slurmctld slurmd slurm-client munge \
    slurm-wlm-basic-plugins libpmi2-0 libpmix2 libslurm-dev gcc libc6-dev procps iproute2 util-linux >/dev/null
}

slurm_daemons::munge() {
  if munge -n 2>/dev/null | unmunge >/dev/null 2>&1; then return; fi
  install -d -o munge -g munge /run/munge /var/log/munge /var/lib/munge
  [[ -s /etc/munge/munge.key ]] || runuser -u munge -- mungekey --create --keyfile /etc/munge/munge.key
  runuser -u munge -- munged
}

# Prints the settings that both clusters have. Arguments: name of the cluster, address of the controller, its port, the folder.
slurm_daemons::settings() {
  cat <<CONF
ClusterName=$1
SlurmctldHost=$(uname -n)($2)
SlurmctldPort=$3
SlurmUser=root
AuthType=auth/munge
StateSaveLocation=$4/state
SlurmdSpoolDir=$4/spool/%n
SlurmctldPidFile=$4/pid/controller
SlurmdPidFile=$4/pid/%n
SlurmctldLogFile=$4/log/controller
SlurmdLogFile=$4/log/%n
ProctrackType=proctrack/linuxproc
TaskPlugin=${TASK_PLUGIN:-task/none}
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SlurmdParameters=config_overrides
ReturnToService=2
MessageTimeout=100
BatchStartTimeout=200
PartitionName=batch Nodes=ALL Default=YES MaxTime=INFINITE State=UP
CONF
}

# Waits until so many nodes ($1) are idle. Argument 2: the folder with the daemons' logs.
slurm_daemons::wait() {
  local i
  for ((i = 0; i < 800; i++)); do
    if [[ $(sinfo -h -t idle -o %D 2>/dev/null) == "$1" ]]; then return; fi
    sleep 0.25
  done
  echo "$(basename -- "$0"): error: the nodes did not come up, see $2/log" >&2
  return 1
}
