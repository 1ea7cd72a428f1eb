# Two commands on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 8
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test slow variants seeds docs lint clean

demo:  ## a dask cluster on this machine, and a computation on it
	@tools/install $(PYTHON) $(VENV) demo
	$(VENV)/bin/gpujobs submit examples/quickstart.yaml --wait
	@echo "Next: docs/first-job.md; your own program: gpujobs submit PROFILE, and examples/README.md"

test:  ## all tests but those marked slow
	@tools/install $(PYTHON) $(VENV) test
	@tools/install-schedulers
	$(VENV)/bin/python -m pytest -n $(WORKERS) --dist worksteal --durations=10 -m "not slow"

slow: WORKERS = 12
slow:  ## the tests marked slow, after `make test`
	@tools/install $(PYTHON) $(VENV) test-examples
	$(VENV)/bin/python -m pytest -n $(WORKERS) --dist worksteal --durations=20 -m "slow and not variant"

variants:  ## the slow tests on fake batch schedulers that Slurm or Grid Engine has, too
	$(VENV)/bin/python -m pytest -n $(WORKERS) --dist worksteal -m variant

seeds:  ## 1,000 seeds of the churn, after `make test`
	GPUJOBS_SEEDS=1000 $(VENV)/bin/python -m pytest -n $(WORKERS) -m slow tests/simulated/test_churn.py tests/simulated/test_drain_churn.py

lint:  ## style and types; prints the size and the words of the code
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/python tools/measure.py

docs:  ## the documentation as a site, in build/docs
	@tools/install $(PYTHON) $(VENV) docs
	$(VENV)/bin/sphinx-build -W --keep-going -n -q -E -b html -c docs . build/docs

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
