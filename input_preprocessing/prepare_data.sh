#!/usr/bin/env bash
# Prepares a data set; see --help. Runs on any machine with Python, without a GPU.
#
# usage: prepare_data.sh --outputdir DIR --packed-data [--skip-download] [--shards N] [--jobs N] [more: --help]
set -euo pipefail
exec "$(dirname -- "${BASH_SOURCE[0]}")/python.sh" prepare "$@"
