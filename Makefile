# help: the main targets · run: the demo on simulated servers · test: everything · check: fast, while you write
# chaos: every fault, with figures · lock: after a change of dependencies · test-tools: a browser, promtool, nginx, HAProxy, keepalived, Redis, valgrind and
# docker-compose from Debian's packages, for tests that are skipped without them
PYTHON ?= python3
VENV := .venv
BENCH := .bench
BIN := $(VENV)/bin
BUILT := build/compiled
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet

.PHONY: run help test test-tools chaos soak hostile test-real test-clients test-loadgens check format lint types collected lock clean compiled pictures bench-dashboard bench-overhead profile bench-routing \
        bench-routing-http bench-routing-real bench-gpu servers-named recording night wheels wheels-check wheels-test image-test sbom

run: $(VENV)/.run
	$(BIN)/lbproxy demo

help:
	@echo 'make run                 a demo: three simulated servers and lbproxy, at http://127.0.0.1:8080'
	@echo 'make check               formatting, lint, types and the quick tests: before every commit'
	@echo 'make test                everything that runs without special hardware'
	@echo 'make test-tools          programs that some tests are skipped without, by apt-get'
	@echo 'make test-real           real vLLM servers on CPU'
	@echo 'make test-clients        client libraries and coding agents through lbproxy'
	@echo 'make chaos               every fault, with its figures: ten minutes'
	@echo 'make soak                half an hour of random faults'
	@echo 'make hostile             an hour of hostile clients and servers beside friendly ones'
	@echo 'make compiled            lbproxy as it is when installed, in build/compiled'
	@echo 'make wheels              the wheels of a release, in dist'
	@echo 'make bench-overhead      what a request costs, beside other proxies'
	@echo 'make bench-routing       policies on simulated fleets'
	@echo 'make bench-routing-http  routers before simulated servers, over HTTP'
	@echo 'make bench-gpu           routers before your vLLM servers: SERVERS="http://box1:8000 http://box2:8000"'
	@echo 'make lock                the lock files anew, after a change of dependencies'
	@echo 'make clean               removes everything that make made'

# Users run lbproxy compiled, so all tests through sockets run compiled, and so do those of the balancer before a simulated
# fleet: they take longest, and see only what it decides. Everything else runs as Python: control, config and sim/engine
# are not compiled. tests/core runs both ways: it is where compiled code may differ from Python, in types, bounds and
# replaced attributes. Its random inputs (hypothesis) run compiled only: what they find, they find there, too.
FLEETS := tests/sim/fleet tests/sim/mock/test_faults.py
SOCKETS := tests/chaos tests/e2e tests/net tests/processes tests/proxy tests/workers
OTHERS := tests/benchmarks tests/real tests/clients tests/loadgens tests/fixtures tests/support tests/__pycache__
AS_PYTHON := $(filter-out $(SOCKETS) $(OTHERS),$(patsubst %/,%,$(wildcard tests/*/)) $(wildcard tests/test_*.py))
# Of those that run compiled, the files with tests that replace methods, which compiled classes do not allow.
REPLACING := tests/net/connections/test_pool.py \
    $(addprefix tests/proxy/,$(addprefix exchange/test_,defects.py opened.py patience.py stages.py) front/test_server.py \
    request/test_routes.py) \
    $(addprefix tests/workers/test_,link.py worker_server.py)
MEASURING := $(addprefix tests/benchmarks/test_,overhead.py overhead_guard.py)
# What runs once more with the data path of a worker process, linked to the balancer by sockets: the rest of what matters
# there are tests/workers and tests/processes. By hand, LBPROXY_TEST_WORKERS=2 runs everything so (docs/testing.md).
IN_WORKER := $(addprefix tests/proxy/,$(addprefix exchange/test_,agents_apis.py ejection.py exchange.py) \
    $(addprefix front/test_,adapter_calls.py unknown_models.py) request/test_trace_context.py)
# Tests through sockets mostly wait, so there are more workers than cores; of those that compute, at most six, as each worker
# collects all tests. LBPROXY_WORKERS=2 for a machine with little memory.
LBPROXY_WORKERS ?= 10
PYTEST := $(BIN)/python -m pytest --numprocesses $(LBPROXY_WORKERS) --dist worksteal
# Workers and the processes that tests start import from cached bytecode, also where the environment forbids to write it.
unexport PYTHONDONTWRITEBYTECODE

# Types are checked while mypyc, too, uses one processor only, and the tests are compiled (`collected`), or each of pytest's
# workers would do that for itself. Two of the benchmarks' tests measure, and run by themselves.
test: $(VENV)/.dev lint
	$(MAKE) --no-print-directory --jobs 2 --output-sync types $(BUILT)/.made collected
	$(PYTEST) --numprocesses $(firstword $(filter 1 2 3 4 5,$(LBPROXY_WORKERS)) 6) -m "not (core and hypothesis)" \
	    $(addprefix --ignore=,$(FLEETS)) $(AS_PYTHON) $(REPLACING)
	cd $(BUILT) && ../../$(PYTEST) -p no:cacheprovider $(SOCKETS) tests/core $(FLEETS) tests/benchmarks \
	    $(addprefix --ignore=,$(MEASURING))
	cd $(BUILT) && LBPROXY_TEST_WORKERS=1 ../../$(PYTEST) -p no:cacheprovider $(IN_WORKER)
	cd $(BUILT) && ../../$(BIN)/python -m pytest -p no:cacheprovider $(MEASURING)

test-tools:
	command -v chromium > /dev/null && command -v promtool > /dev/null && command -v nginx > /dev/null && \
	    command -v docker-compose > /dev/null && command -v gcc > /dev/null && \
	    command -v redis-server > /dev/null && command -v haproxy > /dev/null && command -v keepalived > /dev/null && \
	    command -v valgrind > /dev/null && exit 0; \
	    apt-get update -qq; DEBIAN_FRONTEND=noninteractive \
	    apt-get install -qq -y --no-install-recommends chromium prometheus nginx-light docker-compose gcc libc6-dev \
	    redis-server haproxy keepalived valgrind > /dev/null
	@# Debian 12 has no valkey-server but in its backports.
	command -v valkey-server > /dev/null || ! apt-cache show valkey-server > /dev/null 2>&1 || \
	    DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends valkey-server > /dev/null || \
	    echo 'no valkey-server: tests with it are skipped'

# Without the tests of random inputs (hypothesis) and those that measure memory: about half of the CPU time of these folders.
check: $(VENV)/.dev format lint types
	$(PYTEST) --numprocesses 2 -q -m "not hypothesis" -k "not memory and not costs" tests/test_architecture.py \
	    tests/config/test_config.py tests/config/test_config_text.py tests/core tests/sim/engine tests/net

format: $(VENV)/.dev
	$(BIN)/ruff format --quiet .

lint: $(VENV)/.dev
	$(BIN)/ruff check --quiet .
	$(BIN)/ruff format --quiet --check .

types: $(VENV)/.dev
	$(BIN)/mypy --no-error-summary

collected: $(VENV)/.dev
	$(BIN)/python -m pytest --collect-only --quiet > /dev/null

# Real vLLM servers on CPU, in an environment of their own (.real, 2.5 GB): docs/testing.md.
test-real: $(VENV)/.dev
	$(BIN)/python -m tests.real

# Client libraries and coding agents through lbproxy before simulated servers, in environments of their own (.clients, 3 GB):
# docs/testing.md.
test-clients: $(VENV)/.dev
	$(BIN)/python -m tests.clients

# Load generators of others through lbproxy, in environments of their own (.loadgens, 6 GB, and .real): docs/testing.md.
test-loadgens: $(VENV)/.dev
	$(BIN)/python -m tests.loadgens
	LBPROXY_WRITE_DOCS=1 $(BIN)/python -m pytest -q tests/test_docs_loadgens.py

# Every fault with its counts: ten minutes, for the tables of docs/reliability.md. A short form is among the tests.
chaos: $(VENV)/.dev
	$(BIN)/python -m tests.chaos
	LBPROXY_WRITE_DOCS=1 $(BIN)/python -m pytest -q tests/test_docs_reliability.py

soak: $(VENV)/.dev
	$(BIN)/python -m tests.chaos --soak

# An hour; HOSTILE has other arguments, such as --table. With the hot path compiled, as users have it.
hostile: $(BUILT)/.made
	cd $(BUILT) && ../../$(BIN)/python -m tests.security.hostile $(or $(HOSTILE),--minutes 60)

# docs/images/demo.gif: `lbproxy demo --traffic` from begin to end, in the time that it takes.
recording: $(VENV)/.dev
	$(BIN)/python -m benchmarks.recording

# One night for docs/operations.md: eight minutes, with a real Prometheus (make test-tools).
night: $(VENV)/.dev
	$(BIN)/python -m benchmarks.night
	LBPROXY_WRITE_DOCS=1 $(BIN)/python -m pytest -q tests/test_docs_night.py

# Half an hour, at most; writes benchmarks/RESULTS.md. RESUME=1 goes on with a run that was stopped.
bench-overhead: $(BUILT)/.made $(BENCH)/venv/.peers $(BENCH)/litellm/.peer
	cd $(BUILT) && ../../$(BIN)/python -m benchmarks.overhead $(if $(RESUME),--resume)

# All pictures in docs/ that show lbproxy, and what `night` writes: 13 minutes. A test says when they are old.
pictures: recording night
	$(BIN)/python -m benchmarks.dashboard --endpoints 3 --pictures docs/images

# What the dashboard costs; with PICTURES=folder what it looks like. ENDPOINTS=100
bench-dashboard: $(VENV)/.dev
	$(BIN)/python -m benchmarks.dashboard $(if $(ENDPOINTS),--endpoints $(ENDPOINTS)) $(if $(PICTURES),--pictures $(PICTURES))

bench-routing: $(VENV)/.run
	$(BIN)/python -m benchmarks.routing --short

# At most ten minutes; docs/benchmarks.md has the full form. MOONCAKE=path/to/conversation_trace.jsonl, or a stand-in.
bench-routing-http: $(VENV)/.dev $(BENCH)/venv/.peers $(BENCH)/litellm/.peer
	$(BIN)/python -m benchmarks.http_routing --short $(if $(MOONCAKE),--mooncake $(MOONCAKE))

# Before real vLLM servers on CPU (.real, as for test-real), on an otherwise idle machine: 45 minutes. RESUME=1 goes on.
bench-routing-real: $(BUILT)/.made $(BENCH)/venv/.peers
	cd $(BUILT) && ../../$(BIN)/python -m benchmarks.routing_real $(if $(RESUME),--resume)

# Before vLLM servers that run elsewhere (SERVERS, HARDWARE), or that share the GPU here (VLLM): ten minutes, or MINUTES.
VLLM ?= $(shell command -v vllm)
servers-named:
	@test -n '$(SERVERS)$(VLLM)' || { echo 'name vLLM servers: make bench-gpu SERVERS="http://box1:8000 http://box2:8000"'; exit 1; }
bench-gpu: servers-named $(BUILT)/.made $(BENCH)/venv/.peers
	cd $(BUILT) && ../../$(BIN)/python -m benchmarks.routing_real $(if $(SERVERS),--servers $(SERVERS),--gpu $(VLLM)) \
	    $(if $(HARDWARE),--hardware '$(HARDWARE)') $(if $(MINUTES),--minutes $(MINUTES)) $(if $(RESUME),--resume)

profile: $(VENV)/.run $(BENCH)/venv/.peers
	$(BIN)/python -m benchmarks.overhead --profile

# What benchmarks need besides: the load's programs, and peers from PyPI in an environment of their own, each installed
# by itself, since one that is not to be had must not keep the others away.
$(BENCH)/%: benchmarks/overhead/%.c
	mkdir -p $(BENCH)
	$(CC) -O2 -Wall -Wextra -Werror -o $@ $<

$(BENCH)/venv/.peers: benchmarks/overhead/peers.txt
	$(PYTHON) -m venv $(BENCH)/venv
	for peer in $$(grep -v '^#' $<); do \
	    $(BENCH)/venv/bin/python -m pip --disable-pip-version-check install --quiet $$peer || echo "$$peer: not installed"; \
	done
	touch $@

# LiteLLM pins so much that it gets an environment of its own.
$(BENCH)/litellm/.peer:
	$(PYTHON) -m venv $(BENCH)/litellm
	$(BENCH)/litellm/bin/python -m pip --disable-pip-version-check install --quiet 'litellm[proxy]==1.106.2' \
	    || echo "litellm: not installed"
	touch $@

# The environment: from the lock files alone, each package checked against its hashes.
$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "lbproxy needs Python 3.11 or newer: make PYTHON=python3.12")'
	@echo 'Installing into $(VENV) ...'
	$(PYTHON) -m venv $(VENV)

# uv installs in seconds what takes pip a minute, which judges each of 60,000 files of the index. Where it finds nothing, since
# it does not read pip's settings, pip does it.
$(VENV)/.uv: requirements-dev.lock | $(VENV)/bin/python
	sed -n '/^uv==/,/^    #/p' $< > $@
	$(PIP) --require-hashes -r $@ || { rm $@; exit 1; }
UV := $(BIN)/python -m uv pip install --quiet

$(VENV)/.run: requirements.lock pyproject.toml $(VENV)/.uv
	$(UV) --require-hashes -r requirements.lock || $(PIP) --require-hashes -r requirements.lock
	$(PIP) --no-deps --no-build-isolation -e .
	touch $@

$(VENV)/.dev: requirements-dev.lock pyproject.toml $(VENV)/.uv
	$(UV) --compile-bytecode --require-hashes -r $< || $(PIP) --require-hashes -r $<
	$(PIP) --no-deps --no-build-isolation -e .
	touch $@ $(VENV)/.run

LOCK := $(BIN)/uv pip compile --universal --python-version 3.11 --generate-hashes --no-header --quiet
lock: $(VENV)/.dev
	$(LOCK) pyproject.toml --group build -o requirements.lock
	$(LOCK) pyproject.toml --group dev -o requirements-dev.lock
	$(LOCK) pyproject.toml --group build --extra otel -c requirements-dev.lock -o requirements-otel.lock
	$(LOCK) pyproject.toml --group build --extra replicas -c requirements-dev.lock -o requirements-replicas.lock
	$(LOCK) pyproject.toml --group build --extra kv-events -c requirements-dev.lock -o requirements-kv-events.lock
	$(LOCK) pyproject.toml --group compile -c requirements-dev.lock -o requirements-compile.lock
	$(LOCK) --group release -c requirements-dev.lock -o requirements-release.lock

# The project as it is when installed: with the hot path compiled (setup.py). Every command works there as it does here.
compiled: $(BUILT)/.made
$(BUILT)/.made: setup.py pyproject.toml $(shell find lbproxy -name '*.py') | $(VENV)/.dev
	rm -rf build
	mkdir -p $(BENCH)
	$(PIP) --no-deps --no-build-isolation --target $(BUILT) .
	rm -rf $(BUILT)/*.dist-info $(BUILT)/bin
	cd $(BUILT) && for one in ../../* ../../.venv ../../.bench; do \
	    case $$one in */lbproxy|*/build|*.egg-info) ;; *) ln -s $$one . ;; esac; done
	touch $@

# A release, in dist: docs/releasing.md. A compiled wheel for each of these, and one of Python modules alone.
PYTHONS ?= $(PYTHON)
wheels: $(VENV)/.dev
	$(BIN)/python -m release.wheels dist $(PYTHONS)

# Each wheel twice: both builds must be the same, byte for byte. Two minutes for each build that compiles.
wheels-check: $(VENV)/.dev
	$(BIN)/python -m release.wheels dist $(PYTHONS) --twice

# What is in dist, installed into empty environments without a compiler, and started.
wheels-test: $(VENV)/.dev
	$(BIN)/python -m release.install dist/*.whl

# The image's build stage with the compiled wheel in dist, as far as it goes without Docker; as root, it runs as the image's user.
image-test: $(VENV)/.dev
	$(BIN)/python -m release.image dist

# CycloneDX, of what the lock files install.
sbom: $(VENV)/.dev
	$(BIN)/python -m release.sbom dist

clean:
	rm -rf $(VENV) .release dist build $(BENCH) .mypy_cache .ruff_cache .pytest_cache .hypothesis
