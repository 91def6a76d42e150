#!/usr/bin/env bash
# One-time set-up (MLPerf's name for this step) of this machine, except for the data.
#
# usage: setup.sh                 a virtual environment in .venv, for runs without an image
#        setup.sh docker [IMAGE]  the container image, default mlperf-bert
#        setup.sh enroot [IMAGE]  the same, as IMAGE.sqsh for run.sub with pyxis
set -euo pipefail
cd "$(dirname -- "${BASH_SOURCE[0]}")"
readonly KIND=${1:-venv} IMAGE=${2:-mlperf-bert}

fail() { echo "setup: error: $*" >&2 && exit 2; }

(($# < 3)) || fail "$3: expected at most a kind and an image"
[[ $IMAGE != *=* ]] || fail "$IMAGE: expected the name of an image"

case $KIND in
  venv) ./launch/tools/setup_venv.sh .venv run ;;
  docker | enroot)
    for program in "$KIND" docker; do
      command -v "$program" >/dev/null || fail "$program is not installed: install it, or run without an image: ./setup.sh"
    done
    [[ $KIND == docker || ! -e $IMAGE.sqsh ]] || fail "$IMAGE.sqsh exists: move it away first"
    docker build -t "$IMAGE" .
    if [[ $KIND == enroot ]]; then enroot import -o "$IMAGE.sqsh" "dockerd://$IMAGE"; fi
    ;;
  *) fail "$KIND: expected venv, docker or enroot" ;;
esac
