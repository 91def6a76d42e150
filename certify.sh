#!/usr/bin/env bash
# Is every GPU of this machine as fast as its peers, and do all compute the same? Runs the benchmark's training step on
# synthetic data, without checkpoint or data set: docs/certify.md.
#   [source configs/config_<SYSTEM>_....sh;] ./certify.sh [--quick]   the config's batch and model, or BERT-large on all GPUs
# --quick: stages of 2 seconds, no other tools, and a one-line verdict, for a health check between jobs.
# DEVICE=cpu: tests the CPUs. A machine without any sign of a GPU is tested so by itself.
# Exit status: 0 pass, 3 pass with warnings, 1 fail, 2 bad input.
set -euo pipefail
# shellcheck source=launch/load.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/launch/load.sh" supervisor run/certify

quick=${1:-}
if [[ $quick == --help || $quick == -h ]]; then sed -n '2,/^set /{/^# /s/^# //p}' "${BASH_SOURCE[0]}" && exit; fi
if (($# > 1)) || [[ $quick && $quick != --quick ]]; then log::die "$*: expected --quick, or settings by variables"; fi
if [[ $quick ]]; then
  variables::default CERTIFY_SECONDS 2
  variables::default CERTIFY_TOOLS none
fi
certify::require_gpus /
export DGXNNODES=1
certify::defaults
RUN_NAME=${RUN_NAME:-certify_$(uname -n)_$(date +%Y%m%d-%H%M%S)}
export CONTAINER_RUNTIME=none
variables::load
export CERTIFY_LINE=${quick:+--line}
supervisor::main local certify
