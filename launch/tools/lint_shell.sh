#!/usr/bin/env bash
# Checks every shell script of the repository: bash itself, shellcheck, shfmt and the length of its lines.
# Usage: lint_shell.sh [FOLDER OF THE TOOLS]
set -euo pipefail
readonly TOOLS=${1:+$(cd "$1" && pwd)/}
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
mapfile -t existing < <(git ls-files --cached --others --exclude-standard '*.sh' '*.sub' '.ci/run' | sort -u | xargs ls -d 2>/dev/null)
# Some patterns that bash refuses pass the others.
for script in "${existing[@]}"; do bash -n "$script"; done
"${TOOLS}shellcheck" -x "${existing[@]}"
"${TOOLS}shfmt" -i 2 -ci -d "${existing[@]}"
if grep -HnE '^.{151}' "${existing[@]}"; then exit 1; fi # more than 150 columns are read twice
# A file that switches a rule off for all of itself hides what comes later.
awk 'FNR == 1 { code = 0 } /^[^#]/ { code = 1 } !code && /^# shellcheck disable/ { print FILENAME ": " $0; found = 1 } END { exit found }' \
  "${existing[@]}"
