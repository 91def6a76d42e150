#!/usr/bin/env bash
# A real Slurm of separate nodes on this one machine, for the tests: each slurmd is in mount, pid, network and host name namespaces of
# its own, with an address on a bridge, and with its own /dev/shm, /run/pyxis and /run/enroot. So a node can lose its power, its
# network or a plugin, and the others do not. Needs root.
#   slurm_nodes.sh up FOLDER           nodes NAME1, NAME2, ...; afterwards: export SLURM_CONF=FOLDER/slurm.conf
#   slurm_nodes.sh down FOLDER
#   slurm_nodes.sh poweroff FOLDER N   all processes of node N are gone at once; `start FOLDER N` brings it back
#   slurm_nodes.sh cut FOLDER N        takes its network link down
#   slurm_nodes.sh enter FOLDER N CMD  runs a command on it
# For up: NODES (2), their NAME (node) before the number, CPUS of each (8; of the last, LAST_CPUS), PORT of the controller (26817, the
# slurmds' is the next one), KILLWAIT (30), SLURMD_TIMEOUT (30),
# EXTRA lines of slurm.conf, TASK_PLUGIN (task/none), CGROUP lines of cgroup.conf. Written for Debian's Slurm 22.05 and newer.
set -euo pipefail
readonly COMMAND=${1:?up, down, poweroff, start, cut or enter} FOLDER=${2:?folder} NODE=${3:-}
readonly NODES=${NODES:-2} NAME=${NAME:-node} CPUS=${CPUS:-8} PORT=${PORT:-26817}
# By the port, since other clusters may run here; a name of a link has at most 15 characters.
readonly BRIDGE=s$PORT LINK=v${PORT}x NET=10.$((100 + PORT % 100)).$((PORT / 100 % 250))
export SLURM_CONF=$FOLDER/slurm.conf
# shellcheck source=tests/launch/slurm_daemons.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/slurm_daemons.sh"

configuration() {
  local i cpus=$CPUS
  slurm_daemons::settings nodes "$NET.254" "$PORT" "$FOLDER"
  echo "SlurmdPort=$((PORT + 1))"
  echo "KillWait=${KILLWAIT:-30}"
  echo "SlurmdTimeout=${SLURMD_TIMEOUT:-30}"
  for ((i = 1; i <= NODES; i++)); do
    if ((i == NODES)); then cpus=${LAST_CPUS:-$CPUS}; fi
    echo "NodeName=$NAME$i NodeAddr=$NET.$i CPUs=$cpus Boards=1 SocketsPerBoard=2 CoresPerSocket=$((cpus / 2)) ThreadsPerCore=1" \
      "RealMemory=$((8000 * cpus))"
  done
  printf '%s\n' "${EXTRA:-}"
}

# Each node's /etc/hosts, for programs that ask the system rather than Slurm.
hosts() {
  local i
  cat /etc/hosts
  for ((i = 1; i <= NODES; i++)); do echo "$NET.$i $NAME$i"; done
}

# The first process of a node's pid namespace, with which all others of it die.
first() { cat -- "$FOLDER/node/$1/first"; }

start() {
  local -r own=$FOLDER/node/$1
  local outside process='' i
  mkdir -p "$own"/{pyxis,enroot,shm} /run/pyxis /run/enroot
  chmod 1777 "$own"/{enroot,shm}
  ip link del "$LINK$1" 2>/dev/null || true
  # shellcheck disable=SC2016 # of the inner shell
  unshare --mount --pid --fork --net --uts --mount-proc --propagation private bash -euc '
    hostname "$4$1"
    mount --bind "$2/pyxis" /run/pyxis
    mount --bind "$2/enroot" /run/enroot
    mount --bind "$2/shm" /dev/shm
    mount --bind "$2/../../hosts" /etc/hosts
    ip link set lo up
    until ip link show eth0 >/dev/null 2>&1; do sleep 0.05; done
    ip addr add "$3.$1/24" dev eth0
    ip link set eth0 up
    exec slurmd -D -N "$4$1"' - "$1" "$own" "$NET" "$NAME" >"$FOLDER/log/node$1.first" 2>&1 </dev/null &
  outside=$!
  for ((i = 0; i < 200; i++)); do
    process=$(tr -d ' ' <"/proc/$outside/task/$outside/children" 2>/dev/null || true)
    if [[ $process ]]; then break; fi
    sleep 0.05
  done
  echo "$process" >"$own/first"
  ip link add "$LINK$1" type veth peer name eth0 netns "$process"
  ip link set "$LINK$1" master "$BRIDGE" up
}

up() {
  local i
  slurm_daemons::packages
  slurm_daemons::munge
  mkdir -p "$FOLDER"/{state,log,pid,spool,node}
  configuration >"$SLURM_CONF"
  printf 'CgroupAutomount=no\n%s\n' "${CGROUP:-}" >"$FOLDER/cgroup.conf"
  hosts >"$FOLDER/hosts"
  ip link add "$BRIDGE" type bridge
  ip addr add "$NET.254/24" dev "$BRIDGE"
  ip link set "$BRIDGE" up
  slurmctld -c
  for ((i = 1; i <= NODES; i++)); do start "$i"; done
  slurm_daemons::wait "$NODES" "$FOLDER"
}

poweroff() {
  kill -KILL "$(first "$NODE")" 2>/dev/null || true
  ip link del "$LINK$NODE" 2>/dev/null || true
}

down() {
  local file
  for file in "$FOLDER"/node/*/first; do
    if [[ -s $file ]]; then kill -KILL "$(<"$file")" 2>/dev/null || true; fi
  done
  if [[ -s $FOLDER/pid/controller ]]; then kill "$(<"$FOLDER/pid/controller")" 2>/dev/null || true; fi
  ip link del "$BRIDGE" 2>/dev/null || true
  find /sys/fs/cgroup/*/slurm_"$NAME"[0-9]* -depth -type d -exec rmdir {} + 2>/dev/null || true
}

case $COMMAND in
  up | down | poweroff) "$COMMAND" ;;
  start) start "$NODE" ;;
  cut) ip link set "$LINK$NODE" down ;;
  enter) nsenter --target "$(first "$NODE")" --mount --pid --net --uts -- "${@:4}" ;;
  *) sed -n '/^#   /s/^#   /usage: /p' "${BASH_SOURCE[0]}" >&2 && exit 2 ;;
esac
