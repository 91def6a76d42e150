#!/usr/bin/env bash
# Body of a stand-in for srun: reads the number of tasks from its options and starts them here, one after the other.
case " $* " in
  *' --help '*) echo "${SRUN_HELP-}" && exit ;;
esac
count=1 node_tasks=1 pids=()
while [[ ${1:-} == -* ]]; do
  case $1 in
    --ntasks=*) count=${1#*=} ;;
    --ntasks-per-node=*) node_tasks=${1#*=} ;;
    --mpi=*) if [[ " ${SRUN_BROKEN-} " == *" ${1#*=} "* ]]; then echo 'srun: error: no such plugin' >&2 && exit 1; fi ;;
    --gres=*) if [[ ${1#*=} == "${SRUN_NO_GRES-}" ]]; then echo 'srun: error: Invalid gres' >&2 && exit 1; fi ;;
    --container-image=*) echo "pyxis: importing" >&2 ;;
  esac
  shift
done
if [[ ${1:-} == /media/mlperf_bert/inside.sh ]]; then shift; fi # of a container
trap 'kill $(jobs -p) 2>/dev/null; exit 143' TERM
trap 'echo srun_got USR1 >>"$FAKE_CALLS"' USR1 # the real one passes it on to its tasks
for ((i = 0; i < count; i++)); do
  SLURM_PROCID=$i SLURM_LOCALID=$((i % node_tasks)) SLURM_NTASKS=$count SLURMD_NODENAME=node$((i / node_tasks)) "$@" <&0 &
  pids+=("$!")
done
status=0
while [[ $(jobs -pr) ]]; do wait "${pids[@]}"; done        # a signal interrupts it
for pid in "${pids[@]}"; do wait "$pid" || status=$?; done # wait -n misses one that ends just then
exit "$status"
