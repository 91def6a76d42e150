#!/usr/bin/env bash
# A BERT-large trained on your own text in a day on 1 to 8 A100 (80 GB); rate published by DeepLearningExamples (docs/train.md).
if [ -z "${BASH_VERSION:-}" ] || shopt -qo posix; then echo 'this config is for bash: start bash, then source it' >&2 && return 2; fi
# shellcheck source=configs/begin.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/begin.sh"
export ROWS=256 RATE=570 LR=4e-4
# shellcheck source=configs/one_day.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/one_day.sh"
# shellcheck source=configs/common.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"
