# NGC PyTorch with this repository and the packages that it needs. Builds without a GPU, from this folder alone:
#   docker build -t mlperf-bert .
# For a submission, name the base by its digest too, as `docker buildx imagetools inspect` prints it:
#   docker build --build-arg DIGEST=sha256:... -t mlperf-bert .
# For Slurm with pyxis: enroot import -o mlperf-bert.sqsh dockerd://mlperf-bert
# Sets no variable of the trainer or the launcher: in pyxis the image's value would win over the user's.
ARG TAG=25.04-py3
ARG DIGEST=
FROM nvcr.io/nvidia/pytorch:${TAG}${DIGEST:+@${DIGEST}}

SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
WORKDIR /workspace/bert

# What the base image has stays as it was built and tested: its versions are constraints, but for what is pinned here.
# Its own list of constraints (PIP_CONSTRAINT) also names packages that it has not.
COPY requirements/image.txt requirements/image.txt
RUN pinned=$(sed -n 's/==.*//p' requirements/image.txt | paste -sd'|') \
    && pip list --format=freeze --exclude-editable | grep -ivE "^($pinned)=" >/tmp/base.txt \
    && PIP_CONSTRAINT=/tmp/base.txt pip install --no-cache-dir -r requirements/image.txt \
    && rm /tmp/base.txt

COPY . .
# Editable: no second copy; a checkout that is mounted comes before this one. Git may not mind who owns that checkout.
RUN pip install --no-cache-dir --no-deps --no-build-isolation -e . \
    && git config --system --add safe.directory '*'
