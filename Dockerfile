# NGC PyTorch with this repository and the packages that it needs. Builds without a GPU, from this folder alone:
#   docker build -t mlperf-bert .
# For a submission, name the base by its digest too, as `docker buildx imagetools inspect` prints it:
#   docker build --build-arg DIGEST=sha256:... -t mlperf-bert .
# Any other base that has PyTorch, pip and git: --build-arg BASE=IMAGE
# For Slurm with pyxis: enroot import -o mlperf-bert.sqsh dockerd://mlperf-bert
# Sets no variable of the trainer or the launcher: in pyxis the image's value would win over the user's.
ARG TAG=25.04-py3
ARG DIGEST=
ARG BASE=nvcr.io/nvidia/pytorch:${TAG}${DIGEST:+@${DIGEST}}
# hadolint ignore=DL3026
FROM ${BASE}

SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
WORKDIR /workspace/bert

# Apart from the code, so that a change of it installs nothing anew.
COPY requirements/image.sh requirements/image.txt requirements/
RUN requirements/image.sh

COPY . .
# Editable: no second copy; a checkout that is mounted comes before this one. Git may not mind who owns that checkout.
RUN pip install --no-cache-dir --no-deps --no-build-isolation -e . \
    && git config --system --add safe.directory '*'
