#!/usr/bin/env bash
# Verifies a prepared data set (MLPerf's name for this step): a table, one verdict, exit code 0 only if it is valid.
#
# usage: verify_dataset.sh DIR [--jobs N] [--json]
set -euo pipefail
exec "$(dirname -- "${BASH_SOURCE[0]}")/input_preprocessing/python.sh" verify "$@"
