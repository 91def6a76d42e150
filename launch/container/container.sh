#!/usr/bin/env bash
# The container of a run, behind one interface. CONTAINER_RUNTIME names the file of launch/container/runtimes/ that says on which
# platforms it runs (runtime_platforms) and where it is the default (runtime_default_on), and defines these functions. An empty CONT
# means none: directly on the node.
#   container::check      stops with one line if the runtime or the image cannot be used; changes nothing
#   container::create     creates this run's container once on every node, for all later commands
#   container::arguments  sets the array container: the prefix that runs a command inside (for pyxis options of srun,
#                         which must come last among srun's). Called again for each command, since folders and
#                         exported variables change between commands
#   container::remove     removes only what create created; may run twice or before create; never fails
# and, if its containers outlive the command that runs in them, for a node, outside of any run (cleanup.sh):
#   container::on_node_list         prints the names of this user's containers, which end in the name of their attempt
#   container::on_node_remove NAME  removes one
# Paths are the same inside and outside, so no variable is translated: container::mounts gives the list.
# shellcheck source=launch/state.sh
source "$REPO_DIR/launch/state.sh"

declare -a container=() mounts=()
# Variables with paths that commands read; fine-tuning adds its own.
declare -a container_inputs=(DATADIR_PHASE2 DATADIR_PHASE2_PACKED EVALDIR CHECKPOINTDIR_PHASE1 BERT_CONFIG INIT_CHECKPOINT
  DEEPSPEED_CONFIG EXPECTED_INVENTORY)

# Names of the runtimes; with a platform ($1), only of its default.
container::runtimes() {
  (cd -- "$REPO_DIR/launch/container/runtimes" && grep -lE "${1:+runtime_default_on=\([^)]*\b$1\b}" -- *.sh | sed 's/.sh$//')
}

# Chooses the runtime of this platform ($1).
container::choose() {
  if [[ -z ${CONT:-} ]]; then export CONTAINER_RUNTIME=none && return; fi
  variables::default CONTAINER_RUNTIME "$(container::runtimes "$1")"
  # shellcheck disable=SC2046 # words
  variables::one_of CONTAINER_RUNTIME $(container::runtimes) none
  if [[ $CONTAINER_RUNTIME == none ]]; then return 0; fi
  local -r platforms=$(sed -n 's/.*runtime_platforms=(\([^)]*\)).*/\1/p' "$REPO_DIR/launch/container/runtimes/$CONTAINER_RUNTIME.sh")
  local -r words=${platforms// / and }
  [[ " $platforms " == *" $1 "* ]] ||
    log::die "CONTAINER_RUNTIME=$CONTAINER_RUNTIME is for ${words^}: use $(container::runtimes "$1"), or start the run there"
}

# Sources the runtime of this platform ($1).
container::load() {
  container::choose "$1"
  if [[ $CONTAINER_RUNTIME != none ]]; then
    container::paths
    unset PYTHONPATH PYTHONHOME # of the host's Python, not the image's
    # shellcheck source=/dev/null
    source "$REPO_DIR/launch/container/runtimes/$CONTAINER_RUNTIME.sh"
  fi
}

# No container.
container::check() { :; }
container::create() { :; }
# shellcheck disable=SC2034 # for other parts
container::arguments() { container=(); }
container::remove() { :; }

# Makes the mounted paths absolute, as the trainer will see them, and refuses paths that mount lists cannot express.
container::paths() {
  local name
  variables::default KERNEL_CACHE "${LOGDIR%/}/.kernels"
  for name in "${container_inputs[@]}" LOGDIR "${variables_outputs[@]}"; do
    if [[ -n ${!name:-} ]]; then
      export "$name=$(realpath -ms -- "${!name}")"
      container::mountable "$name" "${!name}"
    fi
  done
  container::mountable 'the repository' "$REPO_DIR"
}

container::mountable() {
  [[ $2 != *[[:space:],:]* ]] || log::die "$1=$2: a path that is mounted in a container has no space, comma or colon"
}

# Does a path exist on the nodes? run_multinode.sh, which may run on none of them, asks one node.
container::exists() { [[ -e $1 ]]; }

# Sets the array mounts: SOURCE:TARGET:ro or SOURCE:TARGET:rw for each existing file, folder or device that a command may need:
# the repository, data, weights, results and InfiniBand devices at their own paths, and CONTAINER_MOUNTS.
container::mounts() {
  local name entry path
  local -a writable=()
  for name in LOGDIR "${variables_outputs[@]}"; do container::add writable "${!name:-}" rw; done
  mounts=("$REPO_DIR:$REPO_DIR:ro")
  for name in "${container_inputs[@]}"; do
    path=${!name:-}
    # Fine-tuning also needs the vocabulary beside its weights or config, its start test the config, and an index the files that it lists.
    if [[ $path == *.index.json || ($name =~ ^(INIT_CHECKPOINT|BERT_CONFIG)$ && ${RANK_MODULE:-bert} != bert) ]] &&
      ! container::exists "$path/."; then path=$(dirname -- "$path"); fi
    container::add mounts "$path" ro
  done
  mounts+=("${writable[@]}")
  local -r extra=${CONTAINER_MOUNTS:-}
  for entry in ${extra//,/ }; do container::mount "$entry"; done
  if [[ -d /dev/infiniband ]]; then mounts+=(/dev/infiniband:/dev/infiniband:rw); fi
}

# Adds an existing path to an array, unless it is there or within a writable folder: docker refuses duplicates.
container::add() {
  local -n list=$1
  local entry
  for entry in "${writable[@]}" "${list[@]}"; do
    if [[ $2/ == "${entry%%:*}"/* && ($entry == *:rw || $entry == "$2:$2:ro") ]]; then return; fi
  done
  if [[ $2 ]] && container::exists "$2"; then list+=("$2:$2:$3"); fi
}

# Adds an entry of CONTAINER_MOUNTS, in pyxis' syntax: SOURCE[:TARGET][:ro|:rw].
container::mount() {
  local source target mode more
  IFS=: read -r source target mode more <<<"$1"
  if [[ $target == r[ow] && ! $mode ]]; then mode=$target target=''; fi
  [[ ! $more && ${target:-/} == /* && ${mode:-rw} == r[ow] ]] ||
    log::die "CONTAINER_MOUNTS: $1: expected SOURCE[:TARGET][:ro], joined by commas, TARGET an absolute path"
  [[ -e $source ]] || log::die "CONTAINER_MOUNTS: $source: no such file or folder"
  source=$(realpath -s -- "$source")
  mounts+=("$source:${target:-$source}:${mode:-rw}")
}
