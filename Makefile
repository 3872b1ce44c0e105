# Every target starts from a clean checkout: what it needs, it installs into .venv.
PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
BIN := $(VENV)/bin
PROTO_VENV := .venv-protos
PROTO_FILES := $(wildcard protos/fusion/wire/v1/*.proto)
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test test-faults soak check protos bench clean

$(VENV)/.base: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) -e ".[demo]"
	touch $@

$(VENV)/.dev: $(VENV)/.base
	$(PIP) -e ".[demo,test,dev]"
	touch $@

$(PROTO_VENV)/.done: constraints.txt
	$(PYTHON) -m venv $(PROTO_VENV)
	$(PROTO_VENV)/bin/python -m pip install --quiet --disable-pip-version-check grpcio-tools==1.76.0 mypy-protobuf==3.7.0 "setuptools<81"
	touch $@

# Train a GPT over an emulated WAN on this machine. ARGS="--model resnet" and so on.
demo: $(VENV)/.base
	@$(BIN)/fusion demo $(ARGS)

# Two at a time, a file's tests together: processes that wait for each other leave the cores idle.
test: $(VENV)/.dev
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile -m "not faults" $(ARGS)

# The fault scenarios that take long: nodes and coordinators that die, hang, and are cut off.
test-faults: $(VENV)/.dev
	$(BIN)/python -m pytest -m faults $(ARGS)

# Random faults for a while, with all validators after each job.
MINUTES ?= 30
soak: $(VENV)/.dev
	FUSION_SOAK_MINUTES=$(MINUTES) $(BIN)/python -m pytest -m faults -s tests/faults/test_soak.py $(ARGS)

check: $(VENV)/.dev $(PROTO_VENV)/.done
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(MAKE) --no-print-directory protos PROTO_OUT=build/protos
	diff -r -x __init__.py -x __pycache__ build/protos/fusion/wire/v1 fusion/wire/v1

PROTO_OUT ?= .
protos: $(PROTO_VENV)/.done
	rm -rf build/protos
	mkdir -p $(PROTO_OUT)
	PATH="$(CURDIR)/$(PROTO_VENV)/bin:$$PATH" $(PROTO_VENV)/bin/python -m grpc_tools.protoc -Iprotos \
		--python_out=$(PROTO_OUT) --grpc_python_out=$(PROTO_OUT) --mypy_out=$(PROTO_OUT) $(PROTO_FILES)

bench: $(VENV)/.dev
	$(BIN)/python -m benchmarks.overhead --json

clean:
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis $(VENV) $(PROTO_VENV)
