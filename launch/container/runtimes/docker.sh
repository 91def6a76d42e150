#!/usr/bin/env bash
# Docker, by the interface of container.sh: each command runs in a separate container, removed when it ends.
# shellcheck source=launch/load.sh
source "$REPO_DIR/launch/load.sh" run/environment
# shellcheck disable=SC2034 # for other parts
runtime_platforms=(slurm ssh local) runtime_default_on=(ssh local)

# Only this user's containers with this label are ever removed; in a job they are found by their attempt.
DOCKER_KEY=mlperf-bert-run-$(id -u)
DOCKER_LABEL=$DOCKER_KEY=$(uname -n)-$$-$(date +%s)
if [[ ${PLATFORM:-} == slurm ]]; then DOCKER_LABEL=$DOCKER_KEY=${ATTEMPT_NAME:-}; fi
docker_limits=(--ulimit memlock=-1 --ulimit stack=67108864) # not declared: this file is sourced in a function

container::check() {
  [[ $CONT != *.sqsh && $CONT != *.sif ]] ||
    log::die "CONT=$CONT: docker expects an image name, such as mlperf-bert; this file is for another CONTAINER_RUNTIME"
}

# Nothing to create: checks that every node has docker and the image, and that a container starts there.
container::create() {
  answers::run_on_all_nodes docker version --format '{{.Server.Version}}' ||
    log::die "docker does not answer: $(answers::why "$answers_output"); start it, or join the group docker"
  answers::run_on_all_nodes docker image inspect --format '{{.Id}}' "$CONT" ||
    log::die "CONT=$CONT: no such image on every node: docker build -t $CONT . (or docker pull $CONT)"
  docker::starts && return
  local -r output=$answers_output
  # A daemon without CAP_SYS_RESOURCE, such as a rootless one, cannot raise limits.
  docker_limits=()
  docker::starts &&
    log::warn "containers start only without the limits memlock and stack, which InfiniBand may need: $(answers::why "$output")" && return
  if DEVICE=cpu docker::starts; then
    log::die "CONT=$CONT: docker cannot give it GPUs: $(answers::why "$output"): install the NVIDIA container toolkit, or set DEVICE=cpu"
  fi
  answers::die "CONT=$CONT: its container does not start on every node" "$output"
}

docker::starts() {
  container::arguments
  answers::run_on_all_nodes "${container[@]}" true
}

container::arguments() {
  local mount name group
  container=(docker run --rm --init --label "$DOCKER_LABEL" --network host --ipc host --workdir "$REPO_DIR")
  container+=("${docker_limits[@]}" --cap-add SYS_NICE) # for a NUMA memory policy
  if [[ ${DEVICE:-auto} != cpu ]]; then container+=(--gpus all); fi
  # As this user, so that results belong to it and its groups' data can be read.
  container+=(--user "$(id -u):$(id -g)")
  for group in $(id -G); do container+=(--group-add "$group"); done
  container::mounts
  for mount in "${mounts[@]}"; do
    case $mount in
      /dev/shm*) container+=(--volume "$mount") ;;   # a folder
      /dev/*) container+=(--device "${mount%:*}") ;; # SOURCE:TARGET
      *) container+=(--volume "$mount") ;;
    esac
  done
  # Without HOME it would be /, where caches cannot be written; the user needs a name, which the image lacks.
  container+=(--env HOME=/tmp --env "USER=$(id -un)")
  for name in $(docker::environment); do container+=(--env "$name"); done
  container+=(--entrypoint '' "$CONT")
}

# Names of the variables passed to the container: without those that the image sets (as in pyxis), plus a rank's place under srun.
docker::environment() {
  local -r image=$(docker image inspect --format '{{range .Config.Env}}{{println .}}{{end}}' "$CONT" 2>/dev/null | sed 's/=.*//')
  environment::names | grep -vxF -- "${image:-HOME}"
  printf '%s\n' SLURM_PROCID SLURM_LOCALID SLURM_NTASKS SLURMD_NODENAME
}

container::on_node_list() { timeout 20 docker ps --all --filter "label=$DOCKER_KEY" --format "{{.ID}}_{{.Label \"$DOCKER_KEY\"}}"; }
container::on_node_remove() { docker rm --force "${1%%_*}"; }

container::remove() {
  # shellcheck disable=SC2016 # $1 is of the inner shell
  runner::everywhere timeout -k 5 120 bash -c 'docker ps --all --quiet --filter "label=$1" | xargs -r docker rm --force' - "$DOCKER_LABEL" \
    >/dev/null 2>&1 || true
}
