# Every target works on a fresh clone: the virtual environment is made on first use and brought up to date whenever
# pyproject.toml or constraints.txt changes. `make help` lists the targets.

PYTHON ?= python3

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

LMCACHE_VENV := .venv-lmcache
LMCACHE_READY := $(LMCACHE_VENV)/.ready
LMCACHE_PIP := $(LMCACHE_VENV)/bin/python -m pip install --quiet --disable-pip-version-check

PEERS_VENV := .venv-peers
PEERS_READY := $(PEERS_VENV)/.ready
PEERS_PIP := $(PEERS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

.PHONY: help
help:  ## show this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | while IFS=$$'\t' read -r name text; do printf '  %-14s%s\n' "$$name" "$$text"; done

# An environment that exists already is completed, never replaced. torch goes first and by itself, so that it is the build
# that constraints.txt and pip's configuration choose, not one that another package's requirements pull in.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 10) <= v < (3, 14) else f"{sys.executable} is Python {v[0]}.{v[1]}, but 3.10 to 3.13 is needed: make PYTHON=python3.12 ...")'
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { echo "making $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing into $(VENV) (some minutes the first time)"
	@$(PIP) torch
	@$(PIP) -e '.[dev,examples]'
	@touch $@

.PHONY: venv
venv: $(READY)  ## make or update .venv with everything that development and the demo need

.PHONY: demo
demo: $(READY)  ## run the thinker-talker example
	$(BIN)/python examples/qwen3_omni_thinker_talker.py

.PHONY: runner
runner: $(READY)  ## run an engine's loop: continuous batching, chunked prefill, preemption and abort
	$(BIN)/python examples/vllm_style_runner.py

.PHONY: test
test: $(READY)  ## run all tests but the long ones
	$(BIN)/python -m pytest -m 'not long' --durations=10

.PHONY: test-long
test-long: $(READY)  ## run the long tests: examples, connectors, event sources, a short chaos run
	$(BIN)/python -m pytest -m long --durations=10

.PHONY: test-unit
test-unit: $(READY)  ## run the tests that start no Ray
	$(BIN)/python -m pytest tests/unit

.PHONY: test-gpu
test-gpu: $(READY)  ## run the tests that need a CUDA device; they are skipped where there is none
	$(BIN)/python -m pytest tests/gpu -rs

# LMCache needs older packages than the rest, and its wheel asks for GPU packages, so it has an environment of its own, and
# comes without what it asks for. constraints-lmcache.txt names everything that it runs with.
$(LMCACHE_READY): pyproject.toml constraints-lmcache.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v < (3, 14) else f"{sys.executable} is Python {v[0]}.{v[1]}, but LMCache is tested with 3.11 to 3.13: make PYTHON=python3.12 ...")'
	@$(LMCACHE_VENV)/bin/python -m pip --version >/dev/null 2>&1 || { echo "making $(LMCACHE_VENV)"; $(PYTHON) -m venv $(LMCACHE_VENV); }
	@echo "installing into $(LMCACHE_VENV) (some minutes the first time)"
	@$(LMCACHE_PIP) "$$(grep '^torch==' constraints-lmcache.txt)"
	@$(LMCACHE_PIP) -r constraints-lmcache.txt
	@$(LMCACHE_PIP) --no-deps lmcache==0.5.6
	@$(LMCACHE_PIP) --no-deps -e .
	@touch $@

.PHONY: test-lmcache
test-lmcache: $(LMCACHE_READY)  ## run the tests that need the real LMCache, on the CPU, in an environment of their own
	$(LMCACHE_VENV)/bin/python -m pytest tests/lmcache --durations=5

# Other stores that `make bench` measures beside this one. Each is left out, with its reason, where it can't be installed:
# Mooncake's wheel needs Debian's libibverbs1 and ibverbs-providers, Redis its redis-server.
$(PEERS_READY): Makefile
	@$(PEERS_VENV)/bin/python -m pip --version >/dev/null 2>&1 || { echo "making $(PEERS_VENV)"; $(PYTHON) -m venv $(PEERS_VENV); }
	@echo "installing into $(PEERS_VENV)"
	@$(PEERS_PIP) numpy redis hiredis || echo "Redis can't be measured: its packages don't install"
	@$(PEERS_PIP) numpy mooncake-transfer-engine-non-cuda==0.3.13 nvidia-cuda-runtime-cu12 || echo "Mooncake can't be measured: its packages don't install"
	@touch $@

CHAOS_SECONDS ?= 60
CHAOS_SEED ?=

.PHONY: chaos
chaos: $(READY)  ## kill and stop everything at random for CHAOS_SECONDS (60), once per seed in CHAOS_SEED (a random one)
	$(BIN)/python -m tests.chaos --seconds $(CHAOS_SECONDS) $(if $(CHAOS_SEED),--seed $(CHAOS_SEED))

.PHONY: lint
lint: $(READY)  ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

.PHONY: typecheck
typecheck: $(READY)  ## mypy --strict
	$(BIN)/mypy

.PHONY: check
check: lint typecheck  ## lint and typecheck

BENCH_OPTIONS ?=

.PHONY: bench
bench: $(READY)  ## measure hs_cache beside LMCache, Mooncake, Redis, Ray and memcpy, into benchmarks/RESULTS.md
	@for ready in $(LMCACHE_READY) $(PEERS_READY); do $(MAKE) --no-print-directory "$$ready" || echo "going on without $$ready"; done
	$(BIN)/python -m benchmarks $(BENCH_OPTIONS)

.PHONY: clean
clean:  ## remove the environments, caches and build output
	rm -rf $(VENV) $(LMCACHE_VENV) $(PEERS_VENV) build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
