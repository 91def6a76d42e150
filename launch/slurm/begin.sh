#!/usr/bin/env bash
# The beginning of a job script (run.sub, certify.sub), which has found the repository: loads the launcher. Sourced.
REPO_DIR=$(cd -- "$REPO_DIR" && pwd -P)
readonly REPO_DIR
# shellcheck source=launch/load.sh
source "$REPO_DIR/launch/load.sh" supervisor run/certify
