#!/usr/bin/env bash
# One rank of one timed run: takes its place among the ranks, binds to its CPUs and becomes the trainer.
# torchrun sets the rank variables; under srun they follow from Slurm's.
set -euo pipefail
REPO_DIR=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
if [[ -z ${RANK:-} && -n ${SLURM_PROCID:-} ]]; then
  export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS
fi
export PYTHONPATH=$REPO_DIR/implementations:$REPO_DIR${PYTHONPATH:+:$PYTHONPATH}
exec "${PYTHON:-python}" -u -m bert
