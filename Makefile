# make report   verify every implementation that can run on this machine; the report is reports/site/index.html
# make test     the whole suite, with the tests of the suite itself
# Both set up .venv first, with pip alone. A report needs no linters, no browser and no type checker.

PYTHON ?= python3
VENV := .venv
# To compile all files takes longer than the rest of the installation, so pip compiles none. Python compiles a file when
# it first imports it, and keeps the result unless this variable is set.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: report test venv lint clean

report: $(VENV)/.run
	@rm -f reports/runs/latest.jsonl
	$(VENV)/bin/flashproof '*' --records reports/runs/latest.jsonl; status=$$?; \
	$(VENV)/bin/flashproof report $(wildcard reports/records/*.jsonl.gz) reports/runs/latest.jsonl -o reports/site && \
	exit $$status

test: venv
	$(VENV)/bin/pytest

lint: venv
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/clang-format --dry-run --Werror impls/cuda/*.cu impls/cuda/*.cuh impls/cuda/*.h
	$(VENV)/bin/mypy

venv: $(VENV)/.done

INSTALL = $(PYTHON) -m venv $(VENV) && $(VENV)/bin/pip install --quiet --no-compile --constraint constraints.txt

$(VENV)/.run: pyproject.toml constraints.txt
	$(INSTALL) --editable '.[report,triton,cuda]'
	@touch $@

$(VENV)/.done: pyproject.toml constraints.txt
	$(INSTALL) --editable '.[dev]'
	@touch $@ $(VENV)/.run

clean:
	rm -rf $(VENV) reports/site reports/runs
