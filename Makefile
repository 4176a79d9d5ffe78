# Two commands do all the set-up: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin

.PHONY: demo test check lint types env lessons site slides clean

env: $(VENV)/ready

# The constraints file fixes the versions. On Linux PyPI's torch brings CUDA libraries of
# several gigabytes; `make PIP_FLAGS="--extra-index-url URL"` can name a CPU build.
$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check $(PIP_FLAGS) -c constraints.txt -e '.[lab,train,dev]'
	touch $@

demo: env
	$(BIN)/dflash-lab demo

test: env
	$(BIN)/python -m pytest

# For the hand: lint, types, and the tests that take no longer than a second or two.
check: lint types
	$(BIN)/python -m pytest -m "not slow"

types: env
	$(BIN)/mypy

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# Runs every lesson (minutes each) and keeps its outputs.
lessons: env
	$(BIN)/dflash-lab lessons

# The lessons as pages that need neither Python nor scripts.
site: env
	$(BIN)/dflash-lab lessons --site site

# Slides for a class: the lessons' headlines, questions and pictures.
slides: env
	$(BIN)/dflash-lab lessons --slides slides

clean:
	rm -rf $(VENV) build dist *.egg-info report site slides
