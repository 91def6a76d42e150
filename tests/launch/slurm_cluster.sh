#!/usr/bin/env bash
# A real Slurm cluster on this one machine, for the tests: slurmctld and one slurmd a node, without systemd. Needs root.
#   slurm_cluster.sh up FOLDER [NODES] [GPUS] [GRES TYPE]    nodes dgx1, dgx2, ... with fake gpu devices and a fake pyxis
#   slurm_cluster.sh down FOLDER
# Afterwards: export SLURM_CONF=FOLDER/slurm.conf. Written for Debian's Slurm 22.05 and newer.
set -euo pipefail
readonly COMMAND=${1:?up or down} FOLDER=${2:?folder} NODES=${3:-2} GPUS=${4:-8} TYPE=${5:-}
readonly CPUS=32 PORT=${SLURM_TEST_PORT:-16817}
FAKES=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)/fakes
readonly FAKES
export SLURM_CONF=$FOLDER/slurm.conf

packages() {
  if [[ -e /usr/include/slurm/spank.h ]] && command -v slurmctld slurmd srun munged gcc >/dev/null; then return; fi
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends slurmctld slurmd slurm-client munge \
    slurm-wlm-basic-plugins libpmi2-0 libpmix2 libslurm-dev gcc libc6-dev procps >/dev/null
}

munge_daemon() {
  if munge -n 2>/dev/null | unmunge >/dev/null 2>&1; then return; fi
  install -d -o munge -g munge /run/munge /var/log/munge /var/lib/munge
  [[ -s /etc/munge/munge.key ]] || runuser -u munge -- mungekey --create --keyfile /etc/munge/munge.key
  runuser -u munge -- munged
}

configuration() {
  local i
  cat <<CONF
ClusterName=test
SlurmctldHost=$(uname -n)(127.0.0.1)
SlurmctldPort=$PORT
SlurmUser=root
SlurmdUser=root
StateSaveLocation=$FOLDER/state
SlurmdSpoolDir=$FOLDER/spool/%n
SlurmctldPidFile=$FOLDER/pid/controller
SlurmdPidFile=$FOLDER/pid/%n
SlurmctldLogFile=$FOLDER/log/controller
SlurmdLogFile=$FOLDER/log/%n
PlugStackConfig=$FOLDER/plugstack.conf
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=30
MessageTimeout=100
BatchStartTimeout=200
MinJobAge=3600
SchedulerParameters=sched_interval=2,bf_interval=2
PartitionName=batch Nodes=ALL Default=YES MaxTime=INFINITE State=UP
CONF
  if ((GPUS)); then echo 'GresTypes=gpu'; fi
  for ((i = 1; i <= NODES; i++)); do
    echo "NodeName=dgx$i NodeHostname=$(uname -n) NodeAddr=127.0.0.1 Port=$((PORT + i)) CPUs=$CPUS Boards=1" \
      "SocketsPerBoard=2 CoresPerSocket=$((CPUS / 2)) ThreadsPerCore=1 RealMemory=64000" \
      "$( ((GPUS)) && echo "Gres=gpu:${TYPE:+$TYPE:}$GPUS")"
  done
}

devices() {
  local i
  if ((GPUS == 0)); then return; fi
  for ((i = 0; i < GPUS; i++)); do [[ -e $FOLDER/gpu$i ]] || mknod "$FOLDER/gpu$i" c 1 3; done
  echo "NodeName=dgx[1-$NODES] Name=gpu ${TYPE:+Type=$TYPE }File=$FOLDER/gpu[0-$((GPUS - 1))]"
}

up() {
  local i
  packages
  munge_daemon
  mkdir -p "$FOLDER"/{state,log,pid,spool}
  configuration >"$SLURM_CONF"
  devices >"$FOLDER/gres.conf"
  echo 'CgroupAutomount=no' >"$FOLDER/cgroup.conf"
  gcc -shared -fPIC -o "$FOLDER/pyxis.so" "$FAKES/pyxis.c"
  echo "required $FOLDER/pyxis.so $FAKES/pyxis.sh" >"$FOLDER/plugstack.conf"
  slurmctld -c
  for ((i = 1; i <= NODES; i++)); do slurmd -N "dgx$i" -c; done
  for ((i = 0; i < 800; i++)); do
    if [[ $(sinfo -h -t idle -o %D 2>/dev/null) == "$NODES" ]]; then return; fi
    sleep 0.25
  done
  echo "slurm_cluster.sh: error: the nodes did not come up, see $FOLDER/log" >&2
  return 1
}

down() {
  local file
  for file in "$FOLDER"/pid/*; do if [[ -s $file ]]; then kill "$(<"$file")" 2>/dev/null || true; fi; done
}

case $COMMAND in
  up | down) "$COMMAND" ;;
  *) echo "usage: slurm_cluster.sh up|down FOLDER [NODES] [GPUS] [TYPE]" >&2 && exit 2 ;;
esac
