# Two commands, each doing everything on a fresh machine: make demo, make test.
# They need Python 3.11 or later, a C++ compiler, and (the first time) the network and some minutes: docs/install.md.

# Debian's python3 has no ensurepip without its package python3-venv.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$p && break; done)
BIN := .venv/bin
KERNELS := $(wildcard spec_local/kernels/*.cpp spec_local/kernels/*.h)
# requirements-dev.txt has the version of each package, so that everybody tests the same.
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint requirements-dev.txt

.PHONY: demo test test-lowest test-gpu lint format wheels clean

demo: .venv/checked
	$(BIN)/specdec models pull starter
	$(BIN)/python examples/demo.py
	@echo "Next: $(BIN)/specdec run, a chat with the starter model. For the name alone: export PATH=\"$(CURDIR)/$(BIN):\$$PATH\""

test: .venv/installed-dev .venv/all-kernels .venv/rpc .venv/libraries/installed .venv/npm/installed lint
	$(BIN)/specdec models pull starter
	$(BIN)/python -m pytest -n auto tests/unit
	$(BIN)/python -m pytest -n auto tests/llama
	$(BIN)/python tools/test_arm64.py .venv/arm64
	$(BIN)/python -m pytest -n auto --dist loadfile tests/cli
	$(BIN)/python -m pytest -n auto --dist loadfile tests/server
	$(BIN)/python -m pytest -n auto tests/page
	$(BIN)/python -m pytest plugins/llm-specdec/tests
	$(BIN)/python tools/build_wheels.py --installed --to .venv/dist
	$(BIN)/python tools/check_wheels.py --quick .venv/dist

# With the lowest versions that pyproject.toml allows; the tests of training need PyTorch.
test-lowest: .venv/lowest/installed
	.venv/lowest/bin/python -m pytest -n auto --ignore-glob='*/test_training_*' --ignore-glob='*/test_torch_*' tests/unit
	.venv/lowest/bin/python -m pytest -n auto tests/cli/test_help.py tests/cli/test_completion.py tests/cli/test_defaults.py

# On a GPU, or with a driver that computes on the CPU: see tools/test_vulkan.py.
test-gpu: .venv/installed-dev .venv/checked
	$(BIN)/python tools/test_vulkan.py .venv/vulkan

lint: .venv/installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: .venv/installed-dev
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

.venv/bin/python:
	@test -n "$(PYTHON)" || { echo "specdec needs Python 3.11 or later, with venv: install python3-venv, or see docs/install.md" >&2; exit 1; }
	$(PYTHON) -m venv .venv || { rm -rf .venv; exit 1; }

.venv/installed: .venv/bin/python pyproject.toml requirements-dev.txt tools/llama_cpp.cmake
	$(BIN)/python tools/install.py serve
	@touch $@

# A native build of llama.cpp can crash at its first decode (virtual machines claim instructions that they do
# not have). The doctor tries it in a child process, and rebuilds it with fewer of them if it dies. Then it
# compiles the CPU kernels, if their sources have changed.
.venv/checked: .venv/installed $(KERNELS)
	$(BIN)/specdec doctor --fix
	@touch $@

# The tests try each instruction set that the processor has, and a wheel contains all.
.venv/all-kernels: .venv/installed $(KERNELS)
	@echo "Compiling the CPU kernels for all instruction sets, which takes a minute or two."
	$(BIN)/python -m spec_local.kernels.build
	@touch $@

# The tests start workers.
.venv/rpc: .venv/checked
	$(BIN)/specdec doctor --fix rpc
	@touch $@

.venv/installed-dev: .venv/installed
	$(INSTALL) --editable '.[dev]'
	@touch $@

# With the tools of .venv, and the wheel of llama-cpp-python that was compiled for it.
.venv/lowest/installed: .venv/installed requirements-lowest.txt
	$(PYTHON) -m venv .venv/lowest
	.venv/lowest/bin/python -m pip install --quiet --disable-pip-version-check --find-links .venv/wheels \
		--constraint requirements-lowest.txt --editable '.[serve]' \
		pytest pytest-xdist hypothesis jsonschema pexpect 'openai>=3,<4' 'anthropic>=2,<3'
	@touch $@

# Clients of specdec serve that are tested in an environment of their own: some exclude each other's newest versions.
# Without them, their tests are skipped.
.venv/libraries/installed: .venv/bin/python tests/server/client_libraries.txt
	$(PYTHON) -m venv .venv/libraries
	.venv/libraries/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
		-r tests/server/client_libraries.txt && touch $@ || echo "Client libraries could not be installed." >&2

.venv/npm/installed: .venv/bin/python tests/server/client_libraries.package.json
	mkdir -p .venv/npm && cp tests/server/client_libraries.package.json .venv/npm/package.json
	npm install --silent --no-audit --no-fund --prefix .venv/npm && touch $@ || echo "npm packages could not be installed." >&2

# Wheels that can be installed without a compiler, for this kind of processor and system.
wheels: .venv/bin/python
	$(BIN)/python tools/build_wheels.py

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis dist
