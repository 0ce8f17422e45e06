# Everything a developer or CI runs. Nothing beyond Python >= 3.11 and the package index is needed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PROTOS := $(sort $(wildcard protos/stratagem/v1/*.proto))

.DEFAULT_GOAL := help
.PHONY: help setup demo check test sweep images cluster-test kubernetes-test bench docs proto fmt clean

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

setup: $(VENV)/.installed  ## virtual environment with everything installed

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt "torch==2.13.0"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	touch $@

demo: setup  ## train digits under two strategies on an embedded cluster
	$(BIN)/python examples/demo.py

check: setup  ## format, lint, types, protos
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .
	$(BIN)/buf lint
	$(BIN)/mypy

test: setup  ## all tests but the long ones
	$(BIN)/python -m pytest -q -m "not sweep and not docker" --numprocesses 2 --dist loadfile

sweep: setup  ## the long tests: kill each process at each failpoint and compare the bits
	$(BIN)/python -m pytest -q -m sweep --numprocesses 2 --dist worksteal

images:  ## the container images, with a Docker engine
	deploy/docker/build.sh

cluster-test: setup  ## the docker-compose cluster with faults, on a Docker engine
	$(BIN)/python -m pytest -q -m docker

kubernetes-test: setup  ## the Kubernetes overlays against the schemas of three versions
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[kubernetes]"
	$(BIN)/python -m pytest -q tests/deploy/test_kubernetes.py

bench: setup  ## print the benchmark tables
	for script in benchmarks/*.py; do $(BIN)/python $$script || exit 1; done

docs: setup  ## rewrite the generated parts of the documentation
	$(BIN)/python docs/generate.py

proto: setup  ## regenerate the committed stubs
	$(BIN)/python -m tests.generate_stubs

fmt: setup  ## format and fix
	$(BIN)/ruff check --fix --quiet . || true
	$(BIN)/ruff format --quiet .

clean:  ## forget the environment and all caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
