#!/usr/bin/env bash
# In a container: becomes a command. Where a container is only an option of srun (pyxis), each command starts by a path of this file that
# exists in the container alone: a node whose slurmd has not loaded the plugin would run it on the host, in silence. Usage: inside.sh COMMAND...
set -euo pipefail
exec "$@"
