#!/usr/bin/env bash
# First line of every config: unsets the previous config's exports and saves your own, which win.
# shellcheck source=launch/run/exports.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/../launch/run/exports.sh"
exports::begin CONFIG
