#!/usr/bin/env bash
# Downloads and prepares the data set (MLPerf's name for this step): packed rows.
#
# usage: init_datasets.sh --outputdir DIR [options of input_preprocessing/prepare_data.sh]
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
readonly root

exec "$root/input_preprocessing/prepare_data.sh" --packed-data "$@"
