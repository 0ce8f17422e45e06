# Everything a developer or CI runs. Nothing beyond Python >= 3.11 and the package index is needed.
PYTHON ?= python3
PYTHONS ?= python3.11 python3.12 python3.13
# What needs torch of what is beside it, such as a local cluster, whose fork server imports it.
NEED_TORCH := tests/coordinator/core/test_plateau.py \
	$(addprefix tests/common/,job/test_stream_rules.py observe/test_metric_definitions.py \
		process/test_preloaded_programs.py rpc/test_tensor_transfer.py tensors/test_tensor_codec.py) \
	$(addprefix tests/client/,test_real_cluster.py cli/test_one_sentence.py dashboard local \
		$(addprefix sdk/test_,client.py cluster_doctor.py model_shards.py planning.py))
TORCH_FREE := tests/coordinator/core tests/coordinator/strategies tests/client tests/common \
	$(addprefix --ignore=,$(NEED_TORCH))
VENV := .venv
BIN := $(VENV)/bin
PAGE := $(VENV)/page
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check
# uv takes a fifth of pip's time. pip is asked where uv knows no index, as pip's settings name one.
LOCKED = $(BIN)/uv pip install --quiet --python $(BIN)/python --compile-bytecode --require-hashes \
	--no-deps --requirement $(1) || $(PIP) --require-hashes --no-deps --requirement $(1)
# Whatever torch's CUDA builds need is torch's to pin.
LOCK = $(BIN)/uv pip compile --quiet --generate-hashes --universal --python-version 3.11 \
	--constraint constraints.txt --no-annotate --no-header --no-emit-package torch \
	--extra $(1) --output-file $(VENV)/lock pyproject.toml \
	&& awk '/^[a-z]/ { is_cuda = /^(nvidia|cuda)-/ } !is_cuda' $(VENV)/lock > $(2) && rm $(VENV)/lock
PROTOS := $(sort $(wildcard protos/stratagem/v1/*.proto))

# Where nothing compiled is kept, every process of a test compiles all that it imports, and pytest
# all asserts: a third of its work.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup ray lock demo check test elsewhere budget gpu launch-test interop tutorials screenshots browser-test coverage matrix sweep soak flaky mutants images cluster-test kubernetes-test bench docs site proto fmt clean

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

setup: $(VENV)/.installed  ## virtual environment with everything installed

# torch alone is pinned by its version and not by hashes: its CPU builds come from other places than
# its CUDA builds, and are other files of the same version, with other dependencies. The last line
# installs no package but this one, and fails where one is missing or of another version.
$(VENV)/.installed: pyproject.toml constraints.txt requirements.lock
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	awk '/^[a-z]/ { is_uv = /^uv==/ } is_uv' requirements.lock > $(VENV)/uv.lock
	$(PIP) --require-hashes --no-deps --requirement $(VENV)/uv.lock
	$(call LOCKED,requirements.lock)
	$(PIP) --constraint constraints.txt "torch==2.13.0"
	$(PIP) --no-deps --no-build-isolation --editable .
	$(BIN)/python -m pip --disable-pip-version-check check
	touch $@

lock: setup  ## the lock files: what constraints.txt pins, with the hashes of PyPI
	$(call LOCK,dev,requirements.lock)
	$(call LOCK,kubernetes,requirements-kubernetes.lock)
	$(call LOCK,ray,requirements-ray.lock)

demo: setup  ## train digits under two strategies on an embedded cluster
	$(BIN)/python examples/demo.py

check: setup  ## format, lint, types, protos
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .
	$(BIN)/buf lint
	$(BIN)/buf breaking --against tests/golden/protos/0.3.0.binpb
	$(BIN)/mypy

# In the order of their names: xdist would put those with few tests last, which are long ones.
# Three processes on two cores: a test that waits, for a process or a deadline, leaves its core idle.
test: setup  ## all tests but the long ones; ARGS="-k x tests/coordinator/core" chooses
	$(BIN)/python -m pytest -q -m "not sweep and not soak and not docker and not interop and not browser and not launch" \
		--numprocesses 3 --dist loadfile --no-loadscope-reorder --ignore=tests/interop $(ARGS)

elsewhere: setup  ## `make test` a day ahead, in another time zone and locale; DAYS=-90 ZONE=UTC chooses
	$(BIN)/python -m tests.elsewhere $(addprefix --days=,$(DAYS)) $(addprefix --zone=,$(ZONE)) $(MAKE) test

# ARGS="--write" records what was measured; TESTS has options of `make test`.
budget: setup  ## all tests, their CPU seconds by folder, and whether that is more than it may be
	$(MAKE) test ARGS="--cpu-seconds=$(VENV)/cpu_seconds $(TESTS)"
	$(BIN)/python -m tests.cpu_budget $(VENV)/cpu_seconds $(ARGS)

gpu: setup  ## check and measure a device, DEVICE=cuda:0 unless said; ARGS="--only kernels" chooses
	$(BIN)/python -m tests.device $(addprefix --device ,$(DEVICE)) $(ARGS)

launch-test: setup  ## workers that torchrun, Slurm (`.ci/slurm` installs one) and Ray (`make ray`) start
	$(BIN)/python -m pytest -q -m launch

ray: setup  ## Ray, for the tests of launching on it: 70 MB that nothing else needs
	$(call LOCKED,requirements-ray.lock)

interop: setup  ## the examples with libraries that people use, beside the loops that they replace
	$(BIN)/python -m pytest -q -m interop

tutorials: setup  ## run the tutorials as notebooks; ARGS=--write puts their output into the pages
	$(BIN)/python docs/execute_tutorials.py $(ARGS)

screenshots: setup  ## train every strategy and photograph the dashboard for the documentation
	$(BIN)/python -m docs.screenshots

# What checks the page comes from npm. Where that cannot be had, the tests that need it are skipped.
$(PAGE)/.installed: $(addprefix tests/client/dashboard/page_tools/,package.json package-lock.json)
	mkdir -p $(PAGE)
	cp $^ $(PAGE)
	npm ci --prefix $(PAGE) --ignore-scripts --no-audit --no-fund --silent && touch $@ \
		|| echo "npm cannot be had here: neither the page's types nor its rules for all are checked"

browser-test: setup $(PAGE)/.installed  ## the page and the site in a browser, which `.ci/browser` gets where none is
	$(BIN)/python -m pytest -q -m browser tests/client tests/docs

coverage: setup  ## what the core's own tests reach of the core and the strategies; less than now fails
	$(BIN)/python -m pytest -q --numprocesses 2 --cov=stratagem.coordinator.core \
		--cov=stratagem.coordinator.strategies --cov-report=term-missing:skip-covered \
		--cov-fail-under=100 tests/coordinator/core tests/coordinator/strategies

matrix:  ## tests that need no torch, with each Python of PYTHONS that is here
	for python in $(PYTHONS); do \
		if $$python --version 2>/dev/null; then \
			$$python -m venv $(VENV)-$$python \
			&& $(VENV)-$$python/bin/python -m pip install --quiet --disable-pip-version-check \
				--require-hashes --no-deps --requirement requirements.lock \
			&& $(VENV)-$$python/bin/python -m pip install --quiet --disable-pip-version-check \
				--no-deps --no-build-isolation --editable . \
			&& $(VENV)-$$python/bin/python -m pytest -q --numprocesses 2 $(TORCH_FREE) || exit 1; \
		else echo "no $$python here"; fi; \
	done

sweep: setup  ## the longer tests: kill processes at each failpoint and compare the bits
	$(BIN)/python -m pytest -q -m "sweep and not soak" --numprocesses 3 --dist worksteal --ignore=tests/interop $(ARGS)

soak: setup  ## what needs minutes for its verdict, such as random faults; before a release
	$(BIN)/python -m pytest -v -m soak $(ARGS)

flaky: setup  ## ARGS="tests/cluster/test_x.py": 20 times beside 8 busy processes
	$(BIN)/python -m tests.flaky $(ARGS)

mutants: setup  ## one-line defects of the product that no test of `make test` sees; ARGS="--area folds"
	$(BIN)/python -m tests.mutants $(ARGS)

images:  ## the container images, with a Docker engine
	deploy/docker/build.sh

cluster-test: setup  ## the docker-compose cluster with faults, on a Docker engine
	$(BIN)/python -m pytest -q -m docker

kubernetes-test: setup  ## the Kubernetes overlays against the schemas of three versions
	$(call LOCKED,requirements-kubernetes.lock)
	$(BIN)/python -m pytest -q tests/deploy/test_kubernetes.py tests/deploy/test_kubernetes_site.py \
		tests/deploy/test_launched_workers.py

bench: setup  ## print the benchmark tables, but for those of scripts that need arguments
	for script in $(filter-out %slow_links.py %simulated_hosts.py %simulated_site.py,$(wildcard benchmarks/*.py)); do \
		$(BIN)/python $$script || exit 1; \
	done

docs: setup  ## rewrite the generated parts of the documentation
	$(BIN)/python docs/generate.py

site: setup  ## the documentation as a site, in build/site
	$(BIN)/python docs/build_site.py

proto: setup  ## regenerate the committed stubs
	$(BIN)/python -m tests.generate_stubs

fmt: setup  ## format and fix
	$(BIN)/ruff check --fix --quiet . || true
	$(BIN)/ruff format --quiet .

clean:  ## forget the environment and all caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
