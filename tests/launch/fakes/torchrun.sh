#!/usr/bin/env bash
# Stand-in for torchrun: a plain loop over the ranks.
set -uo pipefail
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
pids=()
for ((LOCAL_RANK = 0; LOCAL_RANK < count; LOCAL_RANK++)); do
  RANK=$((node_rank * count + LOCAL_RANK)) setsid "$1" &
  pids+=("$!")
done
status=0
exec {clock}<> <(:)
while ((${#pids[@]})); do
  read -r -t 0.05 -u "$clock" || true # wait -n may miss a rank that ends at that moment
  for i in "${!pids[@]}"; do
    if kill -0 "${pids[i]}" 2>/dev/null; then continue; fi
    ended=${pids[i]}
    unset "pids[i]"
    if wait "$ended"; then continue; fi
    status=1
    if ((${#pids[@]})); then kill "${pids[@]}" 2>/dev/null; fi
    (sleep 5 && kill -KILL "${pids[@]}" 2>/dev/null) >/dev/null 2>&1 & # torchrun itself waits for 30 s
    disown
  done
done
exit "$status"
