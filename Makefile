# make setup | check | test | docs | site | bench | gpu | merge | night | long | lock
python := .venv/bin/python

setup:  ## a development environment in .venv
	python3 -m venv .venv
	.venv/bin/pip install --quiet "$$(grep '^torch==' requirements-dev.lock)"
	.venv/bin/pip install --quiet -r requirements-dev.lock
	.venv/bin/pip install --quiet --no-deps --no-build-isolation --editable .

check:  ## lint and types
	$(python) -m ruff check .
	$(python) -m ruff format --check .
	$(python) -m mypy

test:  ## the tests of every push
	$(python) -m pytest -n 2 --dist worksteal

docs:  ## the pages that are made from code
	$(python) docs/generate.py
	$(python) docs/recipes.py
	$(python) docs/console.py

site:  ## the documentation site, in build/docs
	NO_MKDOCS_2_WARNING=1 $(python) -m mkdocs build --strict

bench:  ## every benchmark, as JSON lines
	$(python) -m benchmarks.load_export --json
	$(python) -m benchmarks.optimizer --json
	$(python) -m benchmarks.states --json
	$(python) -m benchmarks.rivals --json
	$(python) -m benchmarks.rivals.accuracy --json
	$(python) -m benchmarks.step --json
	$(python) -m benchmarks.step --optimizer --json
	$(python) -m benchmarks.overlap --json
	$(python) -m benchmarks.overlap --late --json
	$(python) -m benchmarks.data --json
	$(python) -m benchmarks.checkpoint --params 400M --json
	$(python) -m benchmarks.long_row --json
	for what in memory cap time choice; do $(python) -m benchmarks.plan --$$what --json || exit 1; done

gpu:  ## the engine's laws on an accelerator: docs/gpu.md
	$(python) -m pytest tests/gpu -m gpu --device cuda

merge:  ## the second tier: lint, types and site are part of `bash .ci/run`
	bash .ci/run merge

night:  ## the third tier: the cases that the date chooses
	bash .ci/run night

long: long-cases long-schedules long-crashes long-inputs long-tests long-packages  ## proofs that take hours

long-cases:  # every case of the night
	$(python) -m pytest -n 2 --dist worksteal -m night

long-schedules:
	$(python) -m proofs.interleavings --json
	$(python) -m proofs.races --json
	$(python) -m proofs.rank_races --count 500 --json
	$(python) -m proofs.joint --json

long-crashes:
	$(python) -m proofs.crash sigkill --tier --count 300 --json
	for what in sigkill strace power states corrupt; do $(python) -m proofs.crash $$what --json || exit 1; done
	$(python) -m proofs.signals --json
	$(python) -m proofs.soak --json
	$(python) -m proofs.soak --parts pages bucket --json
	$(python) -m proofs.notice --json

long-inputs:
	for what in jsonl yaml manifest; do $(python) -m proofs.fuzz --target $$what --json || exit 1; done

long-tests:  # a dump of running threads, after 15 minutes, may end the process
	$(python) -m pytest -m long -s -o faulthandler_timeout=0

long-packages:  # what needs packages that the lock has not: buckets, Ray, MLflow
	$(python) -m pip install "obstore>=0.8" "moto[server]>=5.2" boto3 "ray[train]>=2.60" "mlflow>=3.2"
	$(python) -m pytest -m "" tests/test_places.py tests/cli/test_urls.py tests/proofs/test_bucket.py
	$(python) -m pytest -m "" tests/run/test_sinks.py tests/test_launchers.py -k "mlflow or ray"
	$(python) -m proofs.bucket --json

lock:  ## write requirements-dev.lock from .venv, with the hashes of the index
	python3 -m venv build/uv
	build/uv/bin/pip install --quiet uv
	{ head -n 2 requirements-dev.lock; echo "torch==2.13.0"; \
	  .venv/bin/pip freeze --all --exclude-editable | grep -Ev '^(torch|pip)==' \
	  | build/uv/bin/uv pip compile --quiet --no-deps --generate-hashes --no-header --no-annotate \
	      --python .venv/bin/python -; } > build/requirements-dev.lock
	mv build/requirements-dev.lock requirements-dev.lock

.PHONY: setup check test docs site bench gpu merge night long long-cases long-schedules long-crashes long-inputs long-tests lock
