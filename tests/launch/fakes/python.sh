#!/usr/bin/env bash
# Stand-in for the interpreter: torchrun becomes a plain loop over the ranks, everything else runs without site packages.
set -uo pipefail
if [[ ${1:-} != */torchrun.py ]]; then exec "${REAL_PYTHON:?}" -S "$@"; fi
echo "torchrun $*" >>"${FAKE_CALLS:?}"
count='' port='' master=127.0.0.1 node_rank=0 nodes=1
while (($# > 1)); do
  case $1 in
    --nproc-per-node) count=$2 ;;
    --nnodes) nodes=$2 ;;
    --node-rank) node_rank=$2 ;;
    --master-addr) master=$2 ;;
    --master-port) port=$2 ;;
  esac
  shift
done
export MASTER_ADDR=$master MASTER_PORT=$port WORLD_SIZE=$((nodes * count)) LOCAL_RANK
trap 'kill $(jobs -p) 2>/dev/null; exit 1' TERM
for ((LOCAL_RANK = 0; LOCAL_RANK < count; LOCAL_RANK++)); do RANK=$((node_rank * count + LOCAL_RANK)) setsid "$1" & done
status=0
for ((i = 0; i < count; i++)); do
  wait -n || {
    status=1
    mapfile -t left < <(jobs -pr)
    if ((${#left[@]})); then kill "${left[@]}" 2>/dev/null; fi
    (sleep 5 && kill -KILL "${left[@]}" 2>/dev/null) >/dev/null 2>&1 & # torchrun itself waits for 30 s
    disown
  }
done
exit "$status"
