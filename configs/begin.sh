#!/usr/bin/env bash
# First line of every config: unsets the previous config's exports and saves your own, which win.
# Not followed: it is checked by itself, and would be parsed again for every config, for three seconds in all.
# shellcheck source=/dev/null
source "$(dirname -- "${BASH_SOURCE[0]}")/../launch/run/exports.sh"
exports::begin CONFIG
