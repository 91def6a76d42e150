#!/usr/bin/env bash
# Installs image.txt into a container's base image without changing the packages tested there: their versions are constraints,
# except for those that image.txt pins. The base's own constraints (PIP_CONSTRAINT) also list packages that it lacks.
set -euo pipefail
cd "$(dirname -- "${BASH_SOURCE[0]}")"
base=$(mktemp)
trap 'rm -f -- "$base"' EXIT
pinned=$(sed -n 's/==.*//p' image.txt | paste -sd'|')
pip list --format=freeze --exclude-editable | grep -ivE "^($pinned)=" >"$base"
PIP_CONSTRAINT=$base pip install --no-cache-dir -r image.txt
