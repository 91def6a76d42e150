#!/usr/bin/env bash
# Continues a BERT-base or large from the Hub on 1 to 8 A100 (80 GB).
if [ -z "${BASH_VERSION:-}" ] || shopt -qo posix; then echo 'this config is for bash: start bash, then source it' >&2 && return 2; fi
# shellcheck source=configs/begin.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/begin.sh"
export ROWS=32
# shellcheck source=configs/continued.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/continued.sh"
# shellcheck source=configs/common.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"
