#!/usr/bin/env bash
# This site: paths of data, weights, results and the container image, and options of Slurm. Exports only.
# Edit the values below, or export your own: what you export wins over this file and over a config, before or after
# sourcing them. `source env.sh` and `source configs/config_*.sh` go in either order.
# shellcheck source=launch/run/exports.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/launch/run/exports.sh"
exports::begin SITE

# Data and weights, as input_preprocessing/prepare_data.sh lays them out.
export DATADIR=${DATADIR:-/data/bert}
export DATADIR_PHASE2=${DATADIR_PHASE2:-$DATADIR/hdf5/training-4320}
export DATADIR_PHASE2_PACKED=${DATADIR_PHASE2_PACKED:-$DATADIR/packed_data}
export EVALDIR=${EVALDIR:-$DATADIR/eval}
export CHECKPOINTDIR_PHASE1=${CHECKPOINTDIR_PHASE1:-$DATADIR/phase1}
export INIT_CHECKPOINT=${INIT_CHECKPOINT-$CHECKPOINTDIR_PHASE1/model.ckpt-28252.pt}

# Results: one folder a run.
export LOGDIR=${LOGDIR:-results}

# Container image: a .sqsh file or a registry name. Empty runs in the Python environment of the nodes.
export CONT=${CONT:-}

# Slurm: uncomment what this cluster needs. sbatch itself reads the first two.
# export SBATCH_PARTITION=batch SBATCH_ACCOUNT=mlperf
# export GPU_GRES=gpu:h100        # GPUs with a type; none if they are no gres
# export SLURM_MPI_TYPE=pmix      # ranks need none
# export RESERVED_CPUS=84-95      # CPUs of WekaIO or the system, if Slurm does not reserve them
# launch/doctor.sh checks this; docs/variables.md lists every variable.
exports::record SITE
