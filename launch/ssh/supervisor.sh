#!/usr/bin/env bash
# Machines over ssh as a platform of supervisor.sh: those of the array hosts, rank 0's first.
# shellcheck source=launch/state.sh
source "$REPO_DIR/launch/state.sh"
# shellcheck source=launch/run/platform.sh
source "$REPO_DIR/launch/run/platform.sh"

# shellcheck disable=SC2034 # for other parts
platform::choose() { nodes=("${hosts[@]}"); }
