# make demo   generate a project with defaults and train it on the CPU
# make check  lint and the quick tests: two minutes on two cores
# make test   lint and all tests but the slow ones: seven minutes
# make golden what must not change; MARK="not slow" leaves out what takes long
# make test-slow      the slow ones: kills, whole environments
# make test-clusters  clusters of processes that train
# make test-rest      both of these: what make test leaves out
# make test-all       make test, test-slow and test-clusters at once: lint, and each test once
# make test-compat    the private names of TensorFlow and Keras alone, with the versions that are
#             named: make test-compat WITH="tensorflow-cpu==2.21.* keras==3.15.*"
# make lint   ruff, mypy, shellcheck
# make bench  time the engine beside Keras fit and custom loops on the CPU
# make bench-engines OTHER=FOLDER  this engine beside another one, the ctl_core in FOLDER
# make test-pythons  train a project on each Python that pyproject.toml allows, with an environment
#             of its own; make test-pythons PYTHONS="3.12 3.13" for these only
# make test-slurm  launch/slurm.sh on a real Slurm of two nodes here, by Debian's packages, as root
# make test-ray  launch/ray_job.py on a real Ray of two nodes here, in an environment of its own
# make test-clouds  launch/skypilot.yaml and vertex.yaml by the clouds' own packages, without a cloud
# make test-trackers  tracker.py with wandb, MLflow, Comet and Trackio, offline, in an environment of its own
#
# Each makes the virtual environment it needs: .venv-demo for the demo, .venv for the others.
PYTHON ?= python3
VENV ?= .venv
DEMO_VENV ?= .venv-demo

# A process that crashes ends the tests: with another in its place they would wait for ever.
PYTEST = "$(VENV)/bin/python" -m pytest --numprocesses 3 --max-worker-restart 0 \
	--dist loadfile --no-loadscope-reorder --ignore tests/on_ray --ignore tests/on_slurm \
	--ignore tests/on_clouds --ignore tests/on_trackers

.PHONY: demo check test golden test-slow test-clusters test-rest test-all test-pythons test-compat test-slurm test-ray test-clouds test-trackers lint bench bench-engines

demo: $(DEMO_VENV)/.made
	rm -rf demo
	"$(DEMO_VENV)/bin/cookiecutter" . --no-input --default-config --output-dir demo
	"$(DEMO_VENV)/bin/python" -m pip install --quiet --disable-pip-version-check --editable demo/my_training
	VENV="$(DEMO_VENV)" demo/my_training/train.sh --run-name demo
	@"$(DEMO_VENV)/bin/python" scripts/demo_result.py demo/my_training/runs/demo

check: lint
	$(PYTEST) -m quick

test: lint
	$(PYTEST) -m "not slow"

MARK ?= slow or not slow

golden: $(VENV)/.made
	$(PYTEST) -m "$(MARK)" tests/golden

test-slow: $(VENV)/.made
	$(PYTEST) -m "slow and not cluster"

test-clusters: $(VENV)/.made
	$(PYTEST) -m cluster

test-rest: $(VENV)/.made
	$(PYTEST) -m slow

test-all: lint
	$(PYTEST)

test-pythons: $(VENV)/.made
	"$(VENV)/bin/python" scripts/pythons.py $(PYTHONS)

COMPAT_VENV ?= .venv-compat
WITH ?= tensorflow-cpu

test-compat: | python
	rm -rf "$(COMPAT_VENV)"
	"$(PYTHON)" -m venv "$(COMPAT_VENV)"
	"$(COMPAT_VENV)/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	"$(COMPAT_VENV)/bin/python" -m pip install --quiet --disable-pip-version-check $(WITH) pydantic-settings pytest pyyaml rich
	"$(COMPAT_VENV)/bin/python" -m pytest tests/engine/test_compat.py

# A machine without Slurm is told what to install, and .ci/run goes on without.
test-slurm: $(VENV)/.made
	@"$(VENV)/bin/python" -m tests.on_slurm.slurm
	"$(VENV)/bin/python" -m pytest -p no:xdist tests/on_slurm

RAY_VENV ?= .venv-ray

test-ray: $(RAY_VENV)/.made
	"$(RAY_VENV)/bin/python" -m pytest tests/on_ray

$(RAY_VENV)/.made: pyproject.toml | python
	"$(PYTHON)" -m venv "$(RAY_VENV)"
	"$(RAY_VENV)/bin/python" -m pip install --quiet --disable-pip-version-check --editable . \
		"cookiecutter>=2.6,<3" pytest "ray[default,train,tune]>=2.60"
	touch $@

CLOUDS_VENV ?= .venv-clouds

test-clouds: $(CLOUDS_VENV)/.made
	"$(CLOUDS_VENV)/bin/python" -m pytest tests/on_clouds

$(CLOUDS_VENV)/.made: pyproject.toml | python
	"$(PYTHON)" -m venv "$(CLOUDS_VENV)"
	"$(CLOUDS_VENV)/bin/python" -m pip install --quiet --disable-pip-version-check \
		"cookiecutter>=2.6,<3" google-cloud-aiplatform pytest "skypilot>=0.10"
	touch $@

TRACKERS_VENV ?= .venv-trackers

test-trackers: $(TRACKERS_VENV)/.made
	"$(TRACKERS_VENV)/bin/python" -m pytest tests/on_trackers

# The packages are those of the template's pyproject.toml.
$(TRACKERS_VENV)/.made: pyproject.toml | python
	"$(PYTHON)" -m venv "$(TRACKERS_VENV)"
	"$(TRACKERS_VENV)/bin/python" -m pip install --quiet --disable-pip-version-check --editable . \
		"cookiecutter>=2.6,<3" pytest "wandb>=0.26" "mlflow-skinny>=3.10" "sqlalchemy>=2" \
		"alembic>=1.13" "comet_ml>=3.50" "trackio>=0.40"
	touch $@

lint: $(VENV)/.made
	"$(VENV)/bin/ruff" check .
	"$(VENV)/bin/ruff" format --check .
	"$(VENV)/bin/mypy"
	"$(VENV)/bin/shellcheck" .ci/run "{{cookiecutter.project_slug}}/train.sh" "{{cookiecutter.project_slug}}/launch/slurm.sh"

bench: $(VENV)/.made
	"$(VENV)/bin/python" -c "import jax" 2>/dev/null || \
		"$(VENV)/bin/python" -m pip install --quiet --disable-pip-version-check --editable ".[bench]"
	"$(VENV)/bin/python" -m benchmarks

bench-engines: $(VENV)/.made
	"$(VENV)/bin/python" -m benchmarks.engines "$(OTHER)"

$(DEMO_VENV)/.made: | python
	"$(PYTHON)" -m venv "$(DEMO_VENV)"
	"$(DEMO_VENV)/bin/python" -m pip install --quiet --disable-pip-version-check "cookiecutter>=2.6,<3"
	touch $@

$(VENV)/.made: pyproject.toml | python
	test -x "$(VENV)/bin/python" || "$(PYTHON)" -m venv "$(VENV)"
	"$(VENV)/bin/python" -m pip install --quiet --disable-pip-version-check --editable ".[test]"
	touch $@

.PHONY: python
python:
	@"$(PYTHON)" -c 'import sys, ensurepip, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || \
		{ echo "make: $(PYTHON) must be Python 3.11 to 3.13 with the venv module; name another: make PYTHON=python3.12" >&2; exit 2; }
