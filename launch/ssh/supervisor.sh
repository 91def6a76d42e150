#!/usr/bin/env bash
# Machines over ssh as a platform of supervisor.sh: those of the array hosts, rank 0's first.
# shellcheck disable=SC2034,SC2154 # hosts is run_multinode.sh's, nodes is for supervisor.sh
# shellcheck source=launch/run/platform.sh
source "$REPO_DIR/launch/run/platform.sh"

platform::choose() { nodes=("${hosts[@]}"); }
