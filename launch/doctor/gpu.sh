#!/usr/bin/env bash
# doctor: GPUs and driver; how fast they and their links are, certify.sh tests. Sourced by doctor.sh.

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
  fi
}

# Prints a line of fields for each GPU.
doctor::query() {
  nvidia-smi --query-gpu=name,memory.total,driver_version,persistence_mode --format=csv,noheader,nounits
}

# Argument: a line of comma-separated fields for each GPU.
doctor::gpus() {
  local -r count=$(wc -l <<<"$1") wanted=${DGXNGPU:-1}
  local memory driver persistence kinds
  IFS=, read -r _ memory driver persistence <<<"${1//, /,}"
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
}
