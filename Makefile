# Two commands: `make figures` regenerates every figure and table at the quick preset, in results/quick; `make test` tests everything.
PYTHON ?= python3
BIN = .venv/bin

.PHONY: figures test docs check export clean
figures: .venv/ready
	$(BIN)/ncdo paper --preset quick

test: .venv/ready
	$(BIN)/python -m pytest

docs: .venv/ready   ## the chapters, studies and every public name as pages: open site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

check: .venv/ready  ## nothing generated is out of date, nothing breaks the style
	$(BIN)/python tools/build.py check

export: .venv/ready ## after editing a notebook: run it, clean it, export ncdo/, write README.md
	$(BIN)/python tools/build.py export

.venv/ready: settings.ini pyproject.toml setup.py
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

clean:
	rm -rf .venv build site *.egg-info
