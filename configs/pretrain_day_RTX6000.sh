#!/usr/bin/env bash
# A BERT-base trained on your own text in a day on RTX 6000 (48 GB); rate of one assumed equal to an RTX 4090's.
if [ -z "${BASH_VERSION:-}" ] || shopt -qo posix; then echo 'this config is for bash: start bash, then source it' >&2 && return 2; fi
# shellcheck source=configs/begin.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/begin.sh"
export ROWS=128 RATE=1000 LR=6e-4
# shellcheck source=configs/one_day.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/one_day.sh"
# shellcheck source=configs/common.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"
