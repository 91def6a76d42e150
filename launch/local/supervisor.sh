#!/usr/bin/env bash
# This machine as a platform of supervisor.sh.
# shellcheck source=launch/run/platform.sh
source "$REPO_DIR/launch/run/platform.sh"
