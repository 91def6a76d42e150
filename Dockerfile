# NGC PyTorch with this repository and the packages it needs. Builds without a GPU, from this folder:
#   docker build -t mlperf-bert .
# For a submission, pin the base by its digest, printed by `docker buildx imagetools inspect`:
#   docker build --build-arg DIGEST=sha256:... -t mlperf-bert .
# Another base with PyTorch, pip and git: --build-arg BASE=IMAGE
# For Slurm with pyxis: enroot import -o mlperf-bert.sqsh dockerd://mlperf-bert
# The default is of May 2026, with PyTorch 2.12; the kernels are compiled for Triton 3.5.1 to 3.9.0 (tests/bert/kernels/
# test_compile.py). Nothing has run in it yet. CUDA 13 knows GPUs from compute capability 7.5 on: for a V100
# --build-arg TAG=25.04-py3.
# Sets no variable of the trainer or launcher: in pyxis the image's value would win over the user's.
ARG TAG=26.05-py3
ARG DIGEST=
ARG BASE=nvcr.io/nvidia/pytorch:${TAG}${DIGEST:+@${DIGEST}}
# hadolint ignore=DL3026
FROM ${BASE}

SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
WORKDIR /workspace/bert

# Before the code, so that code changes do not reinstall packages.
COPY requirements/image.sh requirements/image.txt requirements/
RUN requirements/image.sh

COPY . .
# Editable: no second copy; a mounted checkout comes before this one. Git must accept another owner of that checkout.
RUN pip install --no-cache-dir --no-deps --no-build-isolation -e . \
    && git config --system --add safe.directory '*'
