#!/usr/bin/env bash
# BERT-base from scratch in two phases on nodes of 8 B200 with 180 GB each: the recipe of two_phases.sh, for
# run_pretraining.sh. DGXNNODES=4 chooses the number of nodes. DATADIR has the data of both phases, made by prepare_data.sh --phases.
if [ -z "${BASH_VERSION:-}" ] || shopt -qo posix; then echo 'this config is for bash: start bash, then source it' >&2 && return 2; fi
# shellcheck source=configs/begin.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/begin.sh"
export PHASE1_BATCHSIZE=1024
BERT_CONFIG=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/models" && pwd -P)/bert_base.json
export BERT_CONFIG
# shellcheck source=configs/two_phases.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/two_phases.sh"
# shellcheck source=configs/common.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"
