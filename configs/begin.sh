#!/usr/bin/env bash
# What every config begins with: forgets the config sourced before, and remembers what you exported, which wins.
# shellcheck source=launch/run/exports.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/../launch/run/exports.sh"
exports::begin CONFIG
