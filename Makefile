# Everything runs in .venv. The first target that needs it sets it up.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.set-up
SERVE ?=
TESTS ?=
WORKERS ?= logical
SHUFFLE ?=
NAME ?=
QUICK ?= 1
BENCH ?=
ACCURACY ?=
GENERATE ?= --quick
CUDA ?=
GPU ?=
DIST ?=
LOCK ?=
SANITIZE ?=
SOAK_REQUESTS ?= 10000
SOAK ?=
DEPLOY ?=
CPP := $(shell find csrc -name "*.cpp" -o -name "*.h" -o -name "*.cu" -o -name "*.cuh")
CORE := setup.py $(shell find csrc -type f -not -path "*/cuda/*" -not -path "*/test/*" -not -name "*.md")

# A worker needs about 1 GiB of memory. Without WORKERS, the tests run in this process.
PARALLEL = $(if $(WORKERS),-n $(WORKERS) --maxprocesses 8 --dist loadgroup --no-loadscope-reorder)
TEST = $(BIN)/pytest $(if $(SHUFFLE),--shuffle $(SHUFFLE))
# pytest's exit status if it selects no tests.
NO_TESTS := 5

.DEFAULT_GOAL := help
.PHONY: help serve test demo generate accuracy bench cuda gpu gpu-check dist lock deploy-check sanitize test-isas lint types soak clean

help: ## Show this list
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

serve: $(READY) ## Serve the demo model in the foreground until Ctrl-C (options: SERVE="--http-port 9000")
	@$(BIN)/vlora serve $(SERVE)

test: $(READY) ## Run all tests in a process per core, then those that compare times (WORKERS=1; a part: TESTS=tests/unit; other order: SHUFFLE=7)
	@$(TEST) $(PARALLEL) -m "not deploy and not alone" $(TESTS) || test $$? = $(NO_TESTS)
	@$(TEST) -m alone $(TESTS) || test $$? = $(NO_TESTS)

test-isas: $(READY) ## Run the kernels' tests with each instruction set of this CPU forced, and with two at once
	@$(BIN)/python -m tests.programs.each_isa $(PARALLEL)

demo: $(READY) ## Send sample images and videos to a server (starts one if there is none) and show the answers
	@$(BIN)/python -m tools.demo.show

generate: $(READY) ## Generate adapters from knowledge items (the full set: GENERATE= ; options: GENERATE="--paper")
	@$(BIN)/python -m tools.generation $(GENERATE)

accuracy: $(READY) ## Send the held-out set to a server and compare with the model card (ACCURACY="--dtype bfloat16")
	@$(BIN)/python -m tools.demo.accuracy $(ACCURACY)

bench: $(READY) ## Run a benchmark, or list them (NAME=step; quick unless QUICK= is empty; BENCH="--json FILE")
	@$(BIN)/python -m benchmarks $(if $(NAME),$(NAME) $(if $(QUICK),--quick) $(BENCH))

cuda: $(READY) ## Compile the operator for CUDA (needs nvcc, no GPU; a part of it: CUDA="--limit 10")
	@$(BIN)/python -m csrc.atmm.cuda.build $(CUDA)

gpu: ## On a machine with a GPU: build, test, search and measure ATMM in 9 minutes, nothing installed (GPU="--out FOLDER")
	@$(PYTHON) -m tools.gpu $(GPU)

gpu-check: $(READY) ## Compile the other GPU kernels for sm_80 and sm_90, and test them in an interpreter (needs no GPU)
	@$(BIN)/python -c "import triton" 2>/dev/null || $(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[gpu-check]'
	@$(BIN)/pytest -q tests/unit/gpu

dist: $(READY) ## Build wheel and sdist, check them, and serve from each in a fresh environment (DIST="--no-trial")
	@$(BIN)/python -m tools.dist $(DIST)

lock: $(READY) ## Write the images' lock files from constraints.txt (torch from a folder: LOCK="--torch-wheels FOLDER")
	@$(BIN)/python -m tools.dist.lock $(LOCK)

soak: $(READY) ## Send requests to two replicas while parts of them fail, in 5 minutes (SOAK_REQUESTS=100000; SOAK="--hours 8")
	@$(BIN)/python -m tests.programs.soak --requests $(SOAK_REQUESTS) $(SOAK)

deploy-check: $(READY) ## Check images, compose, chart, rules and Envoy with their own programs (a part: DEPLOY="-k envoy")
	@$(BIN)/pytest -m deploy tests/deploy $(DEPLOY)

sanitize: $(READY) ## Check the kernels under the address, undefined-behaviour and thread sanitizers (SANITIZE="--only memory")
	@$(BIN)/python csrc/atmm/test/sanitize.py $(SANITIZE)

lint: $(READY) ## Check style and formatting
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/clang-format --dry-run -Werror $(CPP)

types: $(READY) ## Check types
	@$(BIN)/mypy

clean: ## Remove what was set up and built
	rm -rf $(VENV) build dist out .pytest_cache .mypy_cache .ruff_cache .hypothesis backend_src/*.egg-info

$(READY): pyproject.toml constraints.txt $(CORE)
	@$(PYTHON) tools/preflight
	@echo "setting up $(VENV): 2 minutes of work on two free cores, up to 10 on busy ones,"
	@echo "and the download (0.6 GB or more)"
	@$(PYTHON) tools/set_up.py $(VENV)
	@touch $(READY)
