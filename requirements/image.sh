#!/usr/bin/env bash
# Installs image.txt beside what a container's base image has. That stays as it was built and tested: its versions are
# constraints, but for what image.txt pins itself. The base's own list (PIP_CONSTRAINT) also names what it has not.
set -euo pipefail
cd "$(dirname -- "${BASH_SOURCE[0]}")"
base=$(mktemp)
trap 'rm -f -- "$base"' EXIT
pinned=$(sed -n 's/==.*//p' image.txt | paste -sd'|')
pip list --format=freeze --exclude-editable | grep -ivE "^($pinned)=" >"$base"
PIP_CONSTRAINT=$base pip install --no-cache-dir -r image.txt
