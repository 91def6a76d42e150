#!/usr/bin/env bash
# One rank of one timed run: binds to its CPUs and executes the trainer, or the module RANK_MODULE (such as the test before the
# trials). torchrun sets the rank variables; under srun they are derived from Slurm's.
set -euo pipefail
# shellcheck source=launch/load.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/launch/load.sh" node/binding run/kernel_cache
if [[ -z ${RANK:-} && -n ${SLURM_PROCID:-} ]]; then
  export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS LOCAL_WORLD_SIZE=${DGXNGPU:-0}
fi
readonly RANKS_OF_NODE=${DGXNGPU:-1}
# nvidia-smi, and so the binding, numbers the GPUs in this order.
export CUDA_DEVICE_ORDER=${CUDA_DEVICE_ORDER:-PCI_BUS_ID}
# CPU threads of a rank: Slurm's tasks share the node; run_local.sh sets them for torchrun.
if [[ -z ${OMP_NUM_THREADS:-} ]]; then OMP_NUM_THREADS=$(binding::threads "$RANKS_OF_NODE"); fi
export OMP_NUM_THREADS
# Threads that wait give their core up: those that spin, OpenMP's default, take it from the ones they wait for.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}
# Without site and PYTHONPATH, which take time; a rank that is not bound still trains.
NICS=''
if [[ ${BINDING:-numa}${NIC_BINDING:-none} != nonenone || ${RANK:-0} == 0 ]]; then # which shows the table of all ranks
  NICS=$("${PYTHON:-python}" -I -S "$REPO_DIR/launch/node/binding.py" "$$" "${LOCAL_RANK:-0}" "$RANKS_OF_NODE") || true
fi
if [[ $NICS ]]; then export NCCL_IB_HCA=$NICS; fi
kernel_cache::export
export PYTHONPATH=$REPO_DIR/implementations:$REPO_DIR${PYTHONPATH:+:$PYTHONPATH}
# When NCCL aborts ranks on a timeout, PyTorch dumps their last collectives here.
export TORCH_NCCL_DUMP_ON_TIMEOUT=1 TORCH_FR_DUMP_TEMP_FILE=${RUN_DIR:-.}/nccl_${TRIAL:-0}_rank_
export TORCH_NCCL_DEBUG_INFO_TEMP_FILE=$TORCH_FR_DUMP_TEMP_FILE # its older name
exec "${PYTHON:-python}" -u -m "${RANK_MODULE:-bert}"
