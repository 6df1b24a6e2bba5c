# The one door. `make demo` is the main job, `make test` runs the tests; both set themselves up.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
OUT ?= out

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-pd test soak check format bench proto lock clean

help: ## Show this list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY) ## Make .venv and install everything from PyPI (the other targets do it by themselves)

$(READY): pyproject.toml constraints.txt requirements-nixl.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "pdproof needs Python 3.11 or later; set PYTHON=/path/to/python3.11" >&2; exit 1; }
	@echo "setting up $(VENV) (about a minute)"
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { rm -rf $(VENV) && $(PYTHON) -m venv $(VENV); } || \
		{ echo "cannot make $(VENV): install the venv module (Debian: apt-get install python3-venv)" >&2; exit 1; }
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@case "$$(uname -s)-$$(uname -m)" in Linux-x86_64|Linux-aarch64) \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-nixl.txt || \
		echo "warning: NIXL could not be installed: prefill/decode over NIXL is not available, its tests are skipped" >&2;; \
	*) echo "warning: no NIXL for this platform: prefill/decode over NIXL is not available, its tests are skipped" >&2;; \
	esac
	@touch $@

demo: $(READY) ## The main job: cold start against shadow recovery, one page in out/demo
	$(BIN)/pdproof compare --out $(OUT)/demo

demo-pd: $(READY) ## Prefill and decode apart: leases against one timeout, in pages below out/demo-pd
	$(BIN)/pdproof compare --scenario d_crash --time-scale 5 --out $(OUT)/demo-pd/d_crash
	$(BIN)/pdproof compare --scenario surge --time-scale 5 --out $(OUT)/demo-pd/surge
	$(BIN)/pdproof run two_turn --out $(OUT)/demo-pd/two_turn && $(BIN)/pdproof report $(OUT)/demo-pd/two_turn

test: $(READY) ## All tests that this machine can run
	$(BIN)/python -m pytest -n 2 --dist loadfile

soak: $(READY) ## 50,000 random histories of the lease protocol, about ten minutes
	PDPROOF_HISTORIES=50000 $(BIN)/python -m pytest -n 2 --dist load --timeout 600 tests/protocol

check: $(READY) ## Lint, format, types, layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY) ## Mend what ruff can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY) ## Measure; results go to out/bench and are compared with the last
	$(BIN)/python -m benchmarks --out $(OUT)/bench

proto: $(READY) ## Make the code of blocks.proto anew (it is committed; a test compares)
	$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. \
		reference_impl/blockservice/blocks.proto

lock: $(READY) ## Renew constraints.txt from what is installed
	$(BIN)/python -m pip freeze --exclude-editable | grep -v -e '^pdproof' -e '^nixl' > constraints.txt

clean: ## Remove everything that was made
	rm -rf $(VENV) $(OUT) runs build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
