#!/usr/bin/env bash
# NEXP timed trials on several machines over ssh, without Slurm: hosts[0] runs rank 0.
#   source env.sh; source configs/config_<SYSTEM>_....sh; HOSTS='node1 node2' ./run_multinode.sh
# Or with the names of Samsung's script: PYTHON, DGXSYSTEM (a config's name), INPUT_DIR, EVAL_DIR, CHECKPOINTDIR_PHASE1, NEXP.
# CONT set: in containers of that image (CONTAINER_RUNTIME); empty: with the machines' PYTHON.
set -euo pipefail
# The machines: edit this line, or export HOSTS, or HOSTFILE (a hostfile in DeepSpeed's format). user@host names a user; other
# ssh options go into SSH_OPTIONS.
# shellcheck disable=SC2034 # hosts.sh and ssh/supervisor.sh read it
hosts=()

# shellcheck source=launch/load.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/launch/load.sh" supervisor ssh/hosts

variables::take "$@"
hosts::load
variables::trainer
variables::default NCCL_TEST 1
variables::load
hosts::check
supervisor::main ssh trial
