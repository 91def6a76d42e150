#!/usr/bin/env bash
# Samples the power of this node. Usage: power_sampler.sh FOLDER | check
# Writes lines TIME_MS,WATTS to FOLDER/NODE.csv until FOLDER/stop appears, its folder goes, or its parent ends.
#   ipmi  the whole node, at the wall, from its power supplies (ipmitool dcmi; as root or by sudo)
#   nvml  if that does not work, the GPUs only: not valid for a submission
set -uo pipefail
readonly FOLDER=${1:?folder or check} INTERVAL=1 # the power rules ask for a sample a second

sampler::ipmi() {
  { ipmitool dcmi power reading || sudo -n ipmitool dcmi power reading; } 2>/dev/null </dev/null |
    awk '/Instantaneous power reading/ { print $(NF - 1); known = 1 } END { exit !known }'
}

sampler::nvml() {
  nvidia-smi --query-gpu=power.draw --format=csv,noheader,nounits 2>/dev/null </dev/null |
    awk '{ if ($1 !~ /^[0-9.]+$/) exit bad = 1; watts += $1 } END { if (bad || !NR) exit 1; printf "%.1f\n", watts }'
}

sampler::choose() {
  local name
  for name in ipmi nvml; do if "sampler::$name" >/dev/null; then echo "$name" && return; fi; done
  echo "${SLURMD_NODENAME:-$(uname -n)}: neither ipmitool dcmi power reading (as root or by sudo -n)" \
    'nor nvidia-smi reports watts' >&2
  return 1
}

chosen=$(sampler::choose) || exit 1
if [[ $FOLDER == check ]]; then exit 0; fi
readonly FILE=$FOLDER/${SLURMD_NODENAME:-$(uname -n)}.csv
echo "time_ms,watts_$chosen" >"$FILE"
while [[ -d $FOLDER && ! -e $FOLDER/stop ]] && kill -0 "$PPID" 2>/dev/null; do
  sleep "$INTERVAL" & # readings start then, however long each takes
  watts=$("sampler::$chosen") && echo "$(date +%s%3N),$watts" >>"$FILE"
  wait
done
