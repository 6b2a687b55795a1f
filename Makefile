# make demo        generate a project with defaults and train it on the CPU
# make check       lint and the quick tests
# make test        lint and all tests but the slow ones
# make test-slow   the slow ones: kills, clusters of processes, whole environments
# make test-all    both; each test once
# make test-part PART=golden   those of one folder (engine, golden), or PART=others: of all other folders
# make mutations   break the engine in 30 ways, and count how many of the mistakes make check finds
# make golden      what must not change; MARK="not slow" leaves out what takes long
# make lint        ruff, mypy, shellcheck
# make bench       time the engine beside Keras fit and custom loops on the CPU; DEVICE=gpu: on a GPU
# make test-gpu    the tests that need a GPU; scripts/on_gpu.py has these, the benchmark and a soak
# make bench-engines OTHER=FOLDER  this engine beside another one, the ctl_core in FOLDER
# make pictures    draw docs/pictures: a terminal, a run that is killed, and the shapes of the tutorial
# make prove       train, kill and resume in many ways, beside fit and a loop: some minutes
# make exports     export the examples and some layers to LiteRT and ONNX: a table for docs/serving.md; ten minutes
# make soak        kill runs before each of their file operations, resume them, and compare the bits: an hour
#                  of a core for KILLS=1200; needs a C compiler and Linux
# make generated   write the generated pages of docs, the example blank and the data of the example digits
# make docs        build the documentation site in build/site; broken links and unlisted pages fail
# make test-browser  open the site in Chromium, look something up, and take pictures in build/screenshots;
#                  needs Debian's package chromium
# make release VERSION=2.1.0   check the CHANGELOG, set the version, create a tag, print the push command
# make test-pythons    a project on each Python, or on those of PYTHONS="3.12 3.13"; PYTHONS=--ends: the newest
# make test-compat     the private names of TensorFlow and Keras, with those that are named:
#                      WITH="tensorflow-cpu==2.21.* keras==3.15.*"
# make test-slurm      launch/slurm.sh on a real Slurm of two nodes here, by Debian's packages, as root
# make test-ray        launch/ray_job.py on a real Ray of two nodes here
# make test-clouds     launch/skypilot.yaml and vertex.yaml by the clouds' own packages, without a cloud
# make test-trackers   tracker.py with wandb, MLflow, Comet and Trackio, offline
# make test-s3         a mirror in a bucket of a local S3 server
#
# Each makes the virtual environment it needs: .venv, or one of its own.
PYTHON ?= python3
VENV ?= .venv
DEMO_VENV ?= .venv-demo
MARK ?= slow or not slow
DEVICE ?= cpu
KILLS ?= 1200
WITH ?= tensorflow-cpu
PIP = -m pip install --quiet --disable-pip-version-check
# Two more than there are cores, for some tests wait for others' processes; each takes up to 3 GB.
PROCESSES ?= $(shell "$(PYTHON)" -c 'import os; print(min(8, 2 + (os.cpu_count() or 2)))')
# A process that crashes ends the tests: with another in its place they would wait for ever.
# TensorFlow in this environment is that for CPUs, so on a machine with a GPU each run would print
# why it uses none.
PYTEST = CUDA_VISIBLE_DEVICES= "$(VENV)/bin/python" -m pytest --numprocesses $(PROCESSES) --max-worker-restart 0 --dist loadfile \
	--no-loadscope-reorder $(foreach place,browser ray slurm clouds trackers s3,--ignore tests/on_$(place)) --ignore tests/engine_net

.PHONY: demo pictures check test test-slow test-all test-part mutations golden lint bench bench-engines prove exports soak generated release \
	python docs test-browser test-gpu test-pythons test-compat test-slurm test-ray test-clouds test-trackers test-s3

demo: $(DEMO_VENV)/.made
	rm -rf demo
	"$(DEMO_VENV)/bin/cookiecutter" . --no-input --default-config --output-dir demo
	"$(DEMO_VENV)/bin/python" $(PIP) --editable "demo/my_training[cpu]"
	VENV="$(DEMO_VENV)" demo/my_training/train.sh --run-name demo
	@"$(DEMO_VENV)/bin/python" scripts/demo_result.py demo/my_training/runs/demo

pictures: demo
	VENV="$(abspath $(DEMO_VENV))" "$(DEMO_VENV)/bin/python" -m scripts.pictures demo/my_training

check: lint
	$(PYTEST) -m quick

test: lint
	$(PYTEST) -m "not slow"

test-slow: $(VENV)/.made
	$(PYTEST) -m slow

test-all: lint
	$(PYTEST)

test-part: $(VENV)/.made
	$(PYTEST) $(if $(filter others,$(PART)),--ignore tests/engine --ignore tests/golden,tests/$(PART))

mutations: $(VENV)/.made
	"$(VENV)/bin/python" -m scripts.mutations run

golden: $(VENV)/.made
	$(PYTEST) -m "$(MARK)" tests/golden

lint: $(VENV)/.made
	"$(VENV)/bin/ruff" check .
	"$(VENV)/bin/ruff" format --check .
	"$(VENV)/bin/mypy"
	"$(VENV)/bin/shellcheck" .ci/run "{{cookiecutter.project_slug}}/train.sh" "{{cookiecutter.project_slug}}/launch/slurm.sh"

bench: $(if $(filter gpu,$(DEVICE)),.venv-gpu,$(VENV))/.made
	"$(<D)/bin/python" -m benchmarks --device $(DEVICE)

# The other lines train on parts of a GPU what tests train on virtual devices. The last one compares
# the bits of logical replicas there, which switch TF32 off by themselves.
test-gpu: .venv-gpu/.made
	$(<D)/bin/python -m pytest tests/engine/test_gpu.py
	$(<D)/bin/python -m pytest -p tests.helpers.on_gpus tests/engine/test_compilation.py -k one_number
	$(<D)/bin/python -m pytest -p tests.helpers.on_gpus -m "not slow" $(patsubst %,tests/%.py,\
		engine/test_reduction engine/test_step golden/test_any_batch golden/test_models golden/test_numbers)
	AS_IT_IS=1 $(<D)/bin/python -m pytest -p tests.helpers.on_gpus tests/golden/test_logical_replicas.py

bench-engines: $(VENV)/.made
	"$(VENV)/bin/python" -m benchmarks.engines "$(OTHER)"

# What it prints goes into docs/guarantees.md by --into docs/guarantees.md.
prove: $(VENV)/.made
	TF_CPP_MIN_LOG_LEVEL=3 "$(VENV)/bin/python" -m scripts.prove

exports: $(VENV)/.made
	TF_CPP_MIN_LOG_LEVEL=3 "$(VENV)/bin/python" -m scripts.exports --into docs/serving.md

soak: $(VENV)/.made
	nice "$(VENV)/bin/python" -m scripts.soak_operations "$$(mktemp -d)" --kills $(KILLS)

generated: $(VENV)/.made
	"$(VENV)/bin/python" -m scripts.tables
	"$(VENV)/bin/python" -m scripts.make_digits
	"$(VENV)/bin/python" -m ctl_core hooks --stub > templates/examples/blank.py

docs: .venv-docs/.made
	"$(<D)/bin/python" -m scripts.stage_docs
	NO_MKDOCS_2_WARNING=1 "$(<D)/bin/mkdocs" build --strict
	@echo "build/site/index.html"

test-browser: .venv-browser/.made docs
	$(<D)/bin/python -m pytest tests/on_browser

release:
	@"$(PYTHON)" scripts/release.py "$(VERSION)"

test-pythons: $(VENV)/.made
	"$(VENV)/bin/python" scripts/pythons.py $(PYTHONS)

test-compat: | python
	"$(PYTHON)" -m venv --clear .venv-compat
	".venv-compat/bin/python" $(PIP) --no-deps --editable .
	".venv-compat/bin/python" $(PIP) $(WITH) packaging pydantic-settings pytest pyyaml rich tensorboard
	.venv-compat/bin/python -m pytest -m "not slow" $(patsubst %,tests/%.py,engine/test_compat \
		engine/test_reading engine/test_schedule golden/test_any_batch golden/test_hidden_state \
		golden/test_hooks golden/test_mistakes golden/test_models)

# A machine without Slurm is told what to install, and .ci/run goes on without.
test-slurm: $(VENV)/.made
	@"$(VENV)/bin/python" -m tests.on_slurm.slurm
	"$(VENV)/bin/python" -m pytest -p no:xdist tests/on_slurm

test-ray test-clouds test-trackers test-s3: test-%: .venv-%/.made
	$(<D)/bin/python -m pytest tests/on_$*

# The packages are those of the template's pyproject.toml.
packages_ray = --editable . "ray[default,train]>=2.60"
packages_clouds = google-cloud-aiplatform "skypilot>=0.10"
packages_trackers = --editable . "wandb>=0.31" "mlflow-skinny>=3.17" "sqlalchemy>=2.1" \
	"alembic>=1.20" "comet_ml>=3.58" "trackio>=0.43"

packages_s3 = --editable . s3fs "moto[s3]>=5" flask flask-cors

# Without plugins that zensical lacks, so that the site can move there when Material ends, in May 2027.
packages_docs = "mkdocs>=1.6,<2" "mkdocs-material>=9.8,<10" pyyaml

packages_browser = playwright pyyaml

# Without --editable ., which asks for tensorflow-cpu: the two are in each other's way.
packages_gpu = "tensorflow[and-cuda]>=2.21,<2.22" "keras>=3.15,<3.16" "pydantic-settings>=2.15,<3" \
	"rich>=13" pyyaml "tensorboard>=2.21"

.venv-%/.made: pyproject.toml | python
	"$(PYTHON)" -m venv $(@D)
	"$(@D)/bin/python" $(PIP) "cookiecutter>=2.6,<3" pytest $(packages_$*)
	touch $@

$(DEMO_VENV)/.made: | python
	"$(PYTHON)" -m venv "$(DEMO_VENV)"
	"$(DEMO_VENV)/bin/python" $(PIP) "cookiecutter>=2.6,<3"
	touch $@

$(VENV)/.made: pyproject.toml | python
	test -x "$(VENV)/bin/python" || "$(PYTHON)" -m venv "$(VENV)"
	"$(VENV)/bin/python" $(PIP) --editable ".[test]"
	touch $@

python:
	@"$(PYTHON)" -c 'import ensurepip, re, sys, venv; \
		first, end = re.search(r"requires-python = .>=3\.(\d+),<3\.(\d+)", open("pyproject.toml").read()).groups(); \
		sys.exit(not int(first) <= sys.version_info[1] < int(end))' || \
		{ echo "make: $(PYTHON) has to have the venv module, and $$(grep ^requires-python pyproject.toml); name another: make PYTHON=python3.12" >&2; exit 2; }
