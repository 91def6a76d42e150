#!/usr/bin/env bash
# This site: paths of data, weights, results and the container image, and Slurm options. Exports only.
# Edit the values below, or export your own: your exports win over this file and over a config, whether made before or after
# sourcing them. Source env.sh and configs/config_*.sh in either order.
if [ -z "${BASH_VERSION:-}" ] || shopt -qo posix; then echo 'env.sh is for bash: start bash, then source it' >&2 && return 2; fi
# shellcheck source=launch/run/exports.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/launch/run/exports.sh"
exports::begin SITE

# Data and weights, in the layout of input_preprocessing/prepare_data.sh.
export DATADIR=${DATADIR:-/data/bert}
export DATADIR_PHASE2=${DATADIR_PHASE2:-$DATADIR/hdf5/training-4320}
export DATADIR_PHASE2_PACKED=${DATADIR_PHASE2_PACKED:-$DATADIR/packed_data}
export EVALDIR=${EVALDIR:-$DATADIR/eval}
export CHECKPOINTDIR_PHASE1=${CHECKPOINTDIR_PHASE1:-$DATADIR/phase1}
export INIT_CHECKPOINT=${INIT_CHECKPOINT-$CHECKPOINTDIR_PHASE1/model.ckpt-28252.pt}

# Results: one folder per run.
export LOGDIR=${LOGDIR:-results}

# Container image: a .sqsh file or a registry name. Empty: the nodes' Python environment.
export CONT=${CONT:-}

# Slurm: uncomment what this cluster needs. sbatch itself reads the first two.
# export SBATCH_PARTITION=batch SBATCH_ACCOUNT=mlperf
# export GPU_GRES=gpu:h100        # GPUs with a type; `none` without gres
# export SLURM_MPI_TYPE=pmix      # ranks need no MPI
# export RESERVED_CPUS=84-95      # CPUs of WekaIO or the system, if Slurm does not reserve them
# launch/doctor.sh checks this; docs/variables.md lists every variable.
exports::record SITE
