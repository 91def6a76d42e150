#!/usr/bin/env bash
# doctor: GPUs, driver, clocks and NVLink. Sourced by doctor.sh.
# shellcheck disable=SC2154

doctor::gpu() {
  local output
  if [[ ${DEVICE:-auto} == cpu ]]; then
    doctor::row skip GPUs 'DEVICE=cpu'
  elif ! doctor::on_compute_node; then
    doctor::row skip GPUs 'this node submits jobs' 'srun --exclusive launch/doctor.sh machine gpu data'
  elif ! command -v nvidia-smi >/dev/null; then
    doctor::row fail GPUs 'nvidia-smi is not on PATH: no NVIDIA driver' 'install the driver, or: export DEVICE=cpu'
  elif ! output=$(doctor::query 2>&1); then
    doctor::row fail GPUs "${output##*$'\n'}" 'sudo nvidia-smi -q; reload the driver or restart the machine'
  else
    doctor::gpus "$output"
    doctor::gpu_users
    doctor::nvlink
  fi
}

# Prints a line of fields for each GPU. Drivers before 535 have another name for the last field.
doctor::query() {
  local -r fields=name,memory.total,driver_version,persistence_mode,clocks.max.sm format=csv,noheader,nounits
  nvidia-smi --query-gpu="$fields,clocks_event_reasons.active" --format="$format" 2>/dev/null ||
    nvidia-smi --query-gpu="$fields,clocks_throttle_reasons.active" --format="$format"
}

# Argument: a line of comma-separated fields for each GPU.
doctor::gpus() {
  local -r count=$(wc -l <<<"$1") wanted=${DGXNGPU:-1}
  local memory driver persistence clock kinds
  IFS=, read -r _ memory driver persistence clock _ <<<"${1//, /,}"
  kinds=$(cut -d, -f1 <<<"$1" | sort -u | paste -sd/)
  if ((count < wanted)); then
    doctor::row fail GPUs "$count x $kinds and the config wants DGXNGPU=$wanted" 'ask for all GPUs, or source a smaller config'
  else
    doctor::row pass GPUs "$count x $kinds, $((memory / 1024)) GB"
  fi
  if [[ $kinds == */* ]]; then doctor::row warn 'GPU models' "$kinds: the slowest sets the pace" 'CUDA_VISIBLE_DEVICES=<those of one model>'; fi
  doctor::row pass driver "$driver, CUDA $(nvidia-smi | sed -n 's/.*CUDA Version: *\([0-9.]*\).*/\1/p')"
  if [[ $persistence != Enabled ]]; then
    doctor::row warn persistence 'off: the first use of a GPU takes seconds' 'sudo nvidia-smi -pm 1'
  fi
  doctor::clocks "$clock" "$(cut -d, -f6 <<<"${1//, /,}")"
}

# Arguments: highest SM clock; for each GPU a bit mask of throttle reasons. Idle (1) and settings (2) are fine.
doctor::clocks() {
  local -r clock=$1
  local bits slowed=0
  for bits in $2; do
    if [[ $bits == 0x* ]] && ((bits & ~0x3)); then slowed=$((slowed + 1)); fi
  done
  if ((slowed)); then
    doctor::row warn clocks "$slowed GPUs are held below $clock MHz (power, heat or a sync boost)" 'nvidia-smi -q -d PERFORMANCE,TEMPERATURE'
  else
    doctor::row pass clocks "up to $clock MHz, none slowed down"
  fi
}

doctor::gpu_users() {
  local -r users=$(nvidia-smi --query-compute-apps=pid,process_name --format=csv,noheader 2>/dev/null)
  if [[ $users ]]; then doctor::row warn 'GPU processes' "$(wc -l <<<"$users") others: ${users%%$'\n'*}" 'end them, or take another machine'; fi
}

doctor::nvlink() {
  local -r status=$(nvidia-smi nvlink --status 2>/dev/null)
  local -r links=$(grep -c '^[[:space:]]*Link [0-9]' <<<"$status") off=$(grep -ci 'inactive' <<<"$status")
  local fabric
  if ((${DGXNGPU:-1} < 2)); then return; fi
  if ((links == 0)); then
    doctor::row warn NVLink 'none: gradients go over PCIe' 'nvidia-smi topo -m'
  elif ((off)); then
    doctor::row fail NVLink "$off of $links links are inactive" 'nvidia-smi nvlink --status; systemctl restart nvidia-fabricmanager'
  else
    doctor::row pass NVLink "$links links"
  fi
  fabric=$(nvidia-smi -q | awk '/^ *Fabric/ { inside = 1 } inside && /State/ { print $NF; inside = 0 }' | sort -u | grep -vE 'Completed|N/A')
  if [[ $fabric ]]; then
    doctor::row fail 'fabric manager' "$(paste -sd' ' <<<"$fabric")" 'sudo systemctl restart nvidia-fabricmanager'
  fi
}
