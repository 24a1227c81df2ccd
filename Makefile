# Each target sets up .venv first where need be; with nothing to do, that takes a fraction of a second.
#
#     make demo PYTHON=python3.10      with another Python than python3
#     make test PYTEST_ARGS="-k codec"     some tests only
#     make soak SOAK_MINUTES=5 SOAK_ARGS="--seed 1"
#     sudo make bench-network NETWORK_ARGS="--rates 1gbit --ranks 2"

SHELL = /bin/bash
PYTHON ?=
PYTEST_ARGS ?=
SOAK_MINUTES ?= 30
SOAK_ARGS ?=
NETWORK_ARGS ?=
export PYTHON

.DEFAULT_GOAL = help
.PHONY: help setup demo test soak bench bench-network docs lint clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup:  ## make .venv and build Horovod into it (the other targets do this too)
	@scripts/setup.sh

demo: setup  ## train a CNN on two ranks with PyTorch and Keras, uncompressed, fp16 and 2-bit; show table and curves
	@scripts/demo.sh

test: setup  ## run the whole test suite
	@.venv/bin/python -m pytest $(PYTEST_ARGS)

soak: setup  ## kill, add and remove workers of elastic jobs at random for SOAK_MINUTES (30); ends with a summary line
	@.venv/bin/python -m tests.soak --minutes $(SOAK_MINUTES) $(SOAK_ARGS)

bench: setup  ## measure the kernels
	@.venv/bin/python -m hvd_twobit bench kernels

bench-network: setup  ## measure exchanges over links of 100 Mbit/s to 10 Gbit/s as root; writes docs/benchmarks.md
	@.venv/bin/python -m benchmarks.network $(NETWORK_ARGS)

docs: setup  ## build the documentation into build/docs, for build/docs/index.html in a browser
	@.venv/bin/python -m sphinx -W --keep-going -q docs build/docs

lint: setup  ## check style and types
	@.venv/bin/python -m ruff check
	@.venv/bin/python -m mypy

clean:  ## remove .venv and everything else that was made here (the cached wheel of Horovod stays)
	@if [ -e .venv ] && [ ! -e .venv/hvd_twobit.stamp ]; then echo "not made by make, so not removed: .venv"; else rm -rf .venv; fi
	rm -rf build dist results *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find hvd_twobit benchmarks examples tests -name __pycache__ -type d -prune -exec rm -rf {} +
