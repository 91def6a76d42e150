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

# shellcheck source=tests/launch/slurm_daemons.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/slurm_daemons.sh"

configuration() {
  local i
  slurm_daemons::settings test 127.0.0.1 "$PORT" "$FOLDER"
  printf '%s\n' SlurmdUser=root "PlugStackConfig=$FOLDER/plugstack.conf" KillWait=30 MinJobAge=3600 \
    SchedulerParameters=sched_interval=2,bf_interval=2
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
  slurm_daemons::packages
  slurm_daemons::munge
  mkdir -p "$FOLDER"/{state,log,pid,spool}
  configuration >"$SLURM_CONF"
  devices >"$FOLDER/gres.conf"
  echo 'CgroupAutomount=no' >"$FOLDER/cgroup.conf"
  gcc -shared -fPIC -o "$FOLDER/pyxis.so" "$FAKES/pyxis.c"
  echo "required $FOLDER/pyxis.so $FAKES/pyxis.sh" >"$FOLDER/plugstack.conf"
  slurmctld -c
  for ((i = 1; i <= NODES; i++)); do slurmd -N "dgx$i" -c; done
  slurm_daemons::wait "$NODES" "$FOLDER"
}

down() {
  local file
  for file in "$FOLDER"/pid/*; do if [[ -s $file ]]; then kill "$(<"$file")" 2>/dev/null || true; fi; done
}

case $COMMAND in
  up | down) "$COMMAND" ;;
  *) echo "usage: slurm_cluster.sh up|down FOLDER [NODES] [GPUS] [TYPE]" >&2 && exit 2 ;;
esac
