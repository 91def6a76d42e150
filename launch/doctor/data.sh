#!/usr/bin/env bash
# doctor: data and weights. Sourced by doctor.sh.

doctor::data() {
  local name training=''
  if variables::on SYNTH_DATA; then
    doctor::row skip data "SYNTH_DATA=$SYNTH_DATA"
  else
    if doctor::has_config; then training=$(variables::data); else doctor::needs_config 'training data'; fi
    for name in ${training:+"$training"} EVALDIR CHECKPOINTDIR_PHASE1; do doctor::folder "$name"; done
    name=${training:-EVALDIR} # of the same --outputdir
    doctor::manifest "${!name:-}"
  fi
  doctor::trainer
}

doctor::folder() {
  local -r variable=$1 folder=${!1:-}
  local count outside fix='input_preprocessing/prepare_data.sh --outputdir DIR'
  if [[ $(variables::data) == *_PACKED ]]; then fix+=' --packed-data'; fi
  if [[ ! $folder ]]; then
    doctor::row fail "$variable" 'not set' 'source env.sh'
  elif [[ ! -d $folder || ! -r $folder ]]; then
    doctor::row fail "$variable" "$folder: no such folder here, or not readable" "$fix"
  elif outside=$(doctor::linked_outside "$folder") && [[ $outside && ${CONT:-} ]]; then
    doctor::row fail "$variable" "$folder has links to $outside, which is not mounted in the container" "CONTAINER_MOUNTS=$outside:ro"
  else
    count=$(find -L "$folder" -maxdepth 2 -type f | wc -l)
    doctor::row "$( ((count)) && echo pass || echo fail)" "$variable" "$folder, $count files" "$( ((count)) || echo "$fix")"
  fi
}

# The first folder outside a data folder that its links lead to, except those in CONTAINER_MOUNTS.
doctor::linked_outside() {
  local -r mounted=${CONTAINER_MOUNTS:-}
  local path entry
  while IFS= read -r path; do
    for entry in "$(realpath -- "$1")" ${mounted//,/ }; do
      if [[ $path == "${entry%%:*}"/* ]]; then continue 2; fi
    done
    dirname -- "$path" && return
  done < <(find "$1" -maxdepth 2 -type l -exec realpath -m -- {} +)
}

# prepare_data.sh writes its manifest above the data; `verify` compares the contents with it.
doctor::manifest() {
  local -r folder=$1
  local root=$folder
  [[ -d $folder ]] || return 0
  while [[ $root != / ]] && ! compgen -G "$root/prepared-*.json" >/dev/null; do root=$(dirname -- "$root"); done
  if [[ $root == / ]]; then
    doctor::row warn 'data manifest' "$folder was not prepared by prepare_data.sh, or is incomplete" \
      "if it is NVIDIA's: python -m input_preprocessing import_records checks it"
  else
    doctor::row pass 'data manifest' "$(compgen -G "$root/prepared-*.json" | paste -sd' ')" "contents: ./launch/doctor.sh verify"
  fi
}

# Reads the whole data set.
doctor::verify() {
  local folder=${DATADIR:-} output
  if [[ ! -d $folder ]]; then
    doctor::row fail 'data verified' "DATADIR=$folder: no such folder" 'in env.sh: export DATADIR=<--outputdir of prepare_data.sh>'
  elif output=$("$REPO_DIR/verify_dataset.sh" "$folder" 2>&1); then
    doctor::row pass 'data verified' "${output##*$'\n'}"
  else
    doctor::row fail 'data verified' "${output##*$'\n'}" "./verify_dataset.sh $folder"
  fi
}

# The trainer's own check of settings, data, vocabulary and weights.
doctor::trainer() {
  local output
  local -r check=(env "PYTHONPATH=$REPO_DIR/implementations:$REPO_DIR" "$PYTHON" -m bert --check)
  if ! doctor::has_config; then
    doctor::needs_config 'checkpoint, run'
  elif ! python::has_torch "$PYTHON"; then
    doctor::row "$([[ -n ${CONT:-} ]] && echo skip || echo fail)" 'checkpoint, run' "$PYTHON has no torch" \
      "$([[ -n ${CONT:-} ]] && echo 'run.sub does this in the container before it starts' || echo 'make setup')"
  elif output=$(RUN_DIR='' "${check[@]}" 2>&1); then
    doctor::row pass weights "$(sed -n 's/^weights *//p' <<<"$output")"
    doctor::row pass run "$(sed -n 's/^global batch *//p' <<<"$output")"
  else
    doctor::row fail 'checkpoint, run' "${output##*bert: error: }" 'python -m bert --check'
  fi
}
