# Everything runs in .venv; `make setup` makes it and is quick when it is there.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SUDO := $(shell [ "$$(id -u)" = 0 ] || echo sudo)
APT := $(SUDO) env DEBIAN_FRONTEND=noninteractive apt-get

# What pyfuse3 is compiled against and what unmounts for users.
PACKAGES := libfuse3-dev fuse3 pkg-config gcc

.PHONY: setup system demo demo-s3 test lint test-long clean

setup: system $(STAMP)

system:
	@if pkg-config --exists fuse3 2>/dev/null && command -v fusermount3 >/dev/null && command -v cc >/dev/null; \
	then :; \
	elif command -v apt-get >/dev/null; \
	then $(APT) update && $(APT) install -y $(PACKAGES); \
	else echo "install the headers of libfuse 3, fusermount3, pkg-config and a C compiler first" >&2; exit 1; \
	fi

$(STAMP): pyproject.toml | system
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -e '.[test]'
	@touch $@

demo: setup
	$(BIN)/python tools/demo.py

demo-s3: setup
	$(BIN)/python tools/demo_s3.py

lint: setup
	$(BIN)/ruff check ckptfs tests tools
	$(BIN)/mypy

test: lint
	$(BIN)/pytest -m "not long"

test-long: setup
	$(BIN)/pytest -m long

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
