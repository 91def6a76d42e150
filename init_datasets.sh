#!/usr/bin/env bash
# Downloads and prepares the data set (MLPerf's name for this step): packed rows.
#
# usage: init_datasets.sh --outputdir DIR [options of input_preprocessing/prepare_data.sh]
set -euo pipefail
exec "$(dirname -- "${BASH_SOURCE[0]}")/input_preprocessing/prepare_data.sh" --packed-data "$@"
