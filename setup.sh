#!/usr/bin/env bash
# One-time set-up (MLPerf's name for this step) of this machine, except for the data.
#
# usage: setup.sh                 a virtual environment in .venv, for runs without an image
#        setup.sh docker [IMAGE]  the container image, default mlperf-bert
#        setup.sh enroot [IMAGE]  the same, as IMAGE.sqsh for run.sub with pyxis
set -euo pipefail
cd "$(dirname -- "${BASH_SOURCE[0]}")"
readonly KIND=${1:-venv} IMAGE=${2:-mlperf-bert}

fail() {
  echo "setup: error: $*" >&2
  exit 2
}

(($# < 3)) || fail "$3: expected at most a kind and an image"
[[ $IMAGE != *=* ]] || fail "$IMAGE: expected the name of an image"

need() { command -v "$1" >/dev/null || fail "$1 is not installed: $2"; }

build_image() {
  need docker 'install docker, or run without an image: ./setup.sh'
  docker build -t "$IMAGE" .
}

case $KIND in
  venv) ./launch/tools/setup_venv.sh .venv run ;;
  docker) build_image ;;
  enroot)
    need enroot 'see github.com/NVIDIA/enroot, or run without an image: ./setup.sh'
    [[ ! -e $IMAGE.sqsh ]] || fail "$IMAGE.sqsh exists: move it away first"
    build_image
    enroot import -o "$IMAGE.sqsh" "dockerd://$IMAGE"
    ;;
  *) fail "$KIND: expected venv, docker or enroot" ;;
esac
