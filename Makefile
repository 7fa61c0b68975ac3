# make demo   a real job, from nothing to its result      make test       the checks and tests that a commit must pass
# make lint   every check that runs no test               make test-long  the long tests, and every example of the properties
# make fmt    format the code, apply automatic fixes      make test-all   all tests and checks
# make proto  regenerate tidegate/v1 from proto/          make lock       rewrite the locks from requirements/*.in
# make schema the config's JSON schema, for editors       make clean      caches and build outputs (keeps environments, jobs/)
# make mutations    breaks the code on purpose and shows that the tests notice
# make test-chaos   jobs under drawn faults, judged from outside: make test-chaos RUNS=20 SEED=0
# make test-wandb   the rows for W&B, offline, with its packages
# make compose-up   a cluster in a container on this machine (docs/cluster.md)      make compose-down   ends it
# make test-compose the cluster in a container, with Docker
# make deploy       a cluster on the machines of an inventory: make deploy INVENTORY=inventory.yml (docs/deploy.md)
# make undeploy     takes it from them again; its jobs stay
# make test-hosts   a job over two network namespaces, as root
# make test-kubernetes  the manifest against the schema of Kubernetes (110 MB, in .venv-kubernetes)
# make test-sglang  the engine contract and jobs against a real SGLang on the CPU, in .venv-sglang (3 GB, made once)
# make gpu          what works and how fast on this machine's CUDA device, within ten minutes (docs/gpu.md)
# make wheels       the packages that a machine with its own torch and no network lacks: make wheels PY=3.12
#
# PYTHON       the interpreter that makes .venv (3.11 or newer)
# TORCH_INDEX  an extra package index that serves torch, such as PyTorch's CPU one; your pip settings apply as well
# ARGS         passed on to `tidegate demo` and to pytest: make demo ARGS="--seed 1"
# JOBS         test processes side by side, 0 for none: make test JOBS=0 ARGS="tests/unit -k layout"
# PART         the K-th of N parts of the long tests: make test-long PART=2/4; or one part of make gpu: PART=reshard
# RUNS, SEED   the number of runs of make test-chaos, and its first seed; ARGS="--only Kill" draws one kind of fault
# DRY          lists the parts of make gpu and runs none: make gpu DRY=1
# DEVICE       cpu: the parts of make gpu at a tiny size, without CUDA
# WHEELS       the folder of make wheels: make gpu WHEELS=build/wheels/3.12 PYTHON=/path/to/python/with/torch
# COMPOSE      the compose command with its file: COMPOSE="docker-compose -f deploy/compose.yaml"
# INVENTORY    the machines of make deploy, as deploy/ansible/inventory.example.yml names some; ARGS="--check" changes nothing
# PY           the Python of that machine, 3.11 to 3.13: make wheels PY=3.12

PYTHON ?= python3
TORCH_INDEX ?=
ARGS ?=
JOBS ?= 3
PART ?=
RUNS ?= 20
SEED ?= 0
DRY ?=
DEVICE ?= cuda
WHEELS ?=
PY ?= 3.12
COMPOSE ?= docker compose -f deploy/compose.yaml
INVENTORY ?=

VENV := .venv
BIN := $(VENV)/bin
RUNTIME := $(VENV)/.installed-runtime
DEV := $(VENV)/.installed-dev
PIP_INSTALL := -m pip install --disable-pip-version-check --quiet $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
INSTALL := $(BIN)/python $(PIP_INSTALL)
# SGLang has its own environment: its pins differ from Tidegate's
SGLANG_VENV := .venv-sglang
SGLANG := $(SGLANG_VENV)/.installed
# Ansible has its own environment: no job needs it
DEPLOY_VENV := .venv-deploy
ANSIBLE := $(DEPLOY_VENV)/.installed
RELEASE := build/deploy
# The schemas of Kubernetes are as large as all of them together
KUBERNETES_VENV := .venv-kubernetes
KUBERNETES := $(KUBERNETES_VENV)/.installed
# An environment of the wheels, on top of an interpreter that has torch
GPU_VENV := .venv-gpu
# mypy refuses a folder without Python files
CHECKED = $(foreach folder,tidegate cli services simulator benchmarks tests tools examples,\
	$(if $(shell find $(folder) -name '*.py' -print -quit 2>/dev/null),$(folder)))

# Each slot is one process on few cores. More threads would slow each other down, and change the order of sums.
export OMP_NUM_THREADS := 1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help demo compose-up compose-down deploy undeploy test-compose test-hosts test-kubernetes test test-long test-chaos mutations test-wandb test-sglang test-all gpu wheels fmt lint proto schema lock clean

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { \
		echo "make: PYTHON=$(PYTHON) is not on PATH; name a Python of 3.11 or newer: make PYTHON=/path/to/python3.11" >&2; \
		exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "make: PYTHON=$(PYTHON) is $$($(PYTHON) --version 2>&1); Tidegate needs 3.11 or newer: make PYTHON=python3.11" >&2; \
		exit 2; }
	@$(PYTHON) -m venv $(VENV) || { \
		rm -rf $(VENV); \
		echo "make: $(PYTHON) cannot make a venv; on Debian and Ubuntu: apt-get install python3-venv" >&2; \
		exit 2; }

# Two steps of pip: megatron-core's metadata refuses a Python on which its code runs.
$(RUNTIME): requirements/base.txt requirements/megatron.txt pyproject.toml | $(BIN)/python
	@echo "make: installing the packages of a job into $(VENV) (minutes the first time, torch is large)" >&2
	@$(INSTALL) -r requirements/base.txt >&2
	@$(INSTALL) --no-deps --ignore-requires-python -r requirements/megatron.txt >&2
	@$(INSTALL) --no-deps --no-build-isolation --editable . >&2
	@touch $@

$(DEV): requirements/data.txt requirements/dev.txt $(RUNTIME)
	@echo "make: installing the packages of the checks into $(VENV)" >&2
	@$(INSTALL) -r requirements/base.txt -r requirements/data.txt -r requirements/dev.txt >&2
	@touch $@

demo: $(RUNTIME)
	@$(BIN)/tidegate demo $(ARGS)

# Tests of whole jobs wait more than they compute: three processes keep two cores busy.
test: lint
	@$(BIN)/python -m pytest --numprocesses $(JOBS) --dist worksteal $(ARGS)

test-long: $(DEV)
	@$(BIN)/python -m pytest --full -m long --numprocesses $(JOBS) --dist worksteal $(if $(PART),--part $(PART)) $(ARGS)

# One run at a time: each is some 25 processes.
test-chaos: $(DEV)
	@$(BIN)/python -m tests.chaos --runs $(RUNS) --seed $(SEED) $(ARGS)

mutations: $(DEV)
	@$(BIN)/python -m tests.mutations

# Two steps of pip: the metadata of both requires CUDA packages, which are of no use on a CPU.
$(SGLANG): requirements/sglang-cpu.txt requirements/sglang.txt | $(BIN)/python
	@echo "make: installing SGLang for the CPU into $(SGLANG_VENV) (minutes, 3 GB)" >&2
	@rm -rf $(SGLANG_VENV)
	@$(BIN)/python -m venv $(SGLANG_VENV)
	@$(SGLANG_VENV)/bin/python $(PIP_INSTALL) -r requirements/sglang-cpu.txt >&2
	@$(SGLANG_VENV)/bin/python $(PIP_INSTALL) --no-deps -r requirements/sglang.txt >&2
	@touch $@

.PHONY: $(SGLANG_VENV)
$(SGLANG_VENV): $(SGLANG)

test-sglang: $(DEV) $(SGLANG)
	@SGLANG_PYTHON=$(abspath $(SGLANG_VENV))/bin/python $(BIN)/python -m pytest -m sglang $(ARGS)

# The packages stay in $(VENV), so `make test` then runs the tests that need them too.
test-wandb: $(DEV)
	@$(INSTALL) -r requirements/base.txt -r requirements/wandb.in >&2
	@$(BIN)/python -m pytest tests/unit/tracking $(ARGS)

test-all: test test-long mutations test-wandb test-kubernetes test-sglang test-compose test-hosts

# Before an environment is made, for that takes minutes and gigabytes.
.PHONY: gpu-check
gpu-check:
	@$(PYTHON) -m benchmarks.gpu --check --device $(DEVICE) $(if $(PART),--part $(PART))

# DRY asks no package of an environment. WHEELS makes one without a network; else it is the usual one.
gpu: $(if $(DRY),,gpu-check $(if $(WHEELS),$(GPU_VENV),$(DEV)))
	@$(if $(DRY),$(PYTHON),$(if $(WHEELS),$(GPU_VENV),$(VENV))/bin/python) -m benchmarks.gpu --device $(DEVICE) \
		$(if $(PART),--part $(PART)) $(if $(DRY),--dry-run) $(ARGS)

# Asked each time: the environment is made anew for another interpreter or other wheels.
.PHONY: $(GPU_VENV)
$(GPU_VENV):
	@$(PYTHON) tools/offline.py $(GPU_VENV) $(WHEELS) >&2

wheels: $(RUNTIME)
	@$(BIN)/python -m tools.wheels --python $(PY) --into build/wheels/$(PY) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

# Each waits for what it started or ended.
compose-up:
	@$(COMPOSE) up --build --detach --wait $(ARGS)

compose-down:
	@$(COMPOSE) down $(ARGS)

$(ANSIBLE): requirements/deploy.txt | $(BIN)/python
	@$(BIN)/python -m venv $(DEPLOY_VENV)
	@$(DEPLOY_VENV)/bin/python $(PIP_INSTALL) -r requirements/deploy.txt >&2
	@touch $@

$(KUBERNETES): requirements/kubernetes.txt | $(BIN)/python
	@$(BIN)/python -m venv $(KUBERNETES_VENV)
	@$(KUBERNETES_VENV)/bin/python $(PIP_INSTALL) -r requirements/kubernetes.txt >&2
	@touch $@

test-kubernetes: $(KUBERNETES)
	@$(KUBERNETES_VENV)/bin/kubernetes-validate --strict --quiet deploy/kubernetes/*.yaml

# Before an environment is made, for that takes minutes and gigabytes.
.PHONY: inventory-check
inventory-check:
	@test -f "$(INVENTORY)" || { \
		echo "make: INVENTORY=$(INVENTORY) is no file; copy deploy/ansible/inventory.example.yml and name your machines in it" >&2; \
		exit 2; }

# The same sources make the same wheel, so that a second run changes nothing.
$(RELEASE)/name: $(RUNTIME) FORCE
	@rm -rf $(RELEASE)
	@mkdir -p $(RELEASE)/source
	@cp -r cli services simulator tidegate pyproject.toml README.md LICENSE $(RELEASE)/source
	@SOURCE_DATE_EPOCH=315532800 $(BIN)/python -m pip wheel --disable-pip-version-check --quiet --no-deps \
		--no-build-isolation --wheel-dir $(RELEASE) ./$(RELEASE)/source
	@cat $(RELEASE)/*.whl requirements/base.txt requirements/megatron.txt | sha256sum | cut -c 1-12 > $@

.PHONY: FORCE
FORCE:

PLAYBOOK = ANSIBLE_CONFIG=deploy/ansible/ansible.cfg $(DEPLOY_VENV)/bin/ansible-playbook -i $(INVENTORY) $(ARGS)

deploy: inventory-check $(RUNTIME) $(ANSIBLE) $(RELEASE)/name
	@$(PLAYBOOK) deploy/ansible/site.yml -e tidegate_command=$(abspath $(BIN))/tidegate \
		-e tidegate_wheel=$$(ls $(abspath $(RELEASE))/*.whl) -e tidegate_release_name=$$(cat $(RELEASE)/name)

undeploy: inventory-check $(ANSIBLE)
	@$(PLAYBOOK) deploy/ansible/uninstall.yml

test-compose: $(DEV)
	@command -v $(firstword $(COMPOSE)) >/dev/null || { \
		echo "make: $(firstword $(COMPOSE)) is not on PATH; install Docker with its compose command, or name it: COMPOSE=..." >&2; \
		exit 2; }
	@COMPOSE="$(COMPOSE)" $(BIN)/python -m pytest -m compose tests/compose $(ARGS)

test-hosts: $(DEV)
	@$(BIN)/python -m pytest -m hosts tests/hosts $(ARGS)

# The quick checks come first.
lint: $(DEV)
	@$(BIN)/ruff format --check --quiet . || { echo "make: not formatted; make fmt does it" >&2; exit 1; }
	@$(BIN)/ruff check --quiet .
	@$(BIN)/lint-imports --no-cache --no-logo
	@$(BIN)/python -m tools.wire lint drift breaking
	@$(BIN)/mypy $(CHECKED)

fmt: $(DEV)
	@$(BIN)/ruff check --fix --quiet . || true
	@$(BIN)/ruff format .

proto: $(DEV)
	@$(BIN)/python -m tools.wire generate

schema: $(DEV)
	@$(BIN)/python -m tools.schema

lock: $(DEV) $(ANSIBLE) $(KUBERNETES)
	@$(INSTALL) --upgrade -r requirements/base.in -r requirements/data.in -r requirements/dev.in >&2
	@$(BIN)/python -m tools.lock
	@$(DEPLOY_VENV)/bin/python $(PIP_INSTALL) --upgrade -r requirements/deploy.in >&2
	@$(DEPLOY_VENV)/bin/python -m tools.lock deploy
	@$(KUBERNETES_VENV)/bin/python $(PIP_INSTALL) --upgrade -r requirements/kubernetes.in >&2
	@$(KUBERNETES_VENV)/bin/python -m tools.lock kubernetes

clean:
	@rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	@find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
