PYTHON ?= python3
BIN := .venv/bin

demo: .venv/ready  ## generate text with the shipped checkpoint and show the pages
	@$(BIN)/python -m pagetile generate --show-pages < /dev/null
test: check  ## everything that must hold, two files at a time
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --ignore tests/test_import_rules.py
test-gpu: .venv/ready  ## the kernels and the engine on this machine's GPU, then random problems
	$(BIN)/python -m pytest -n 8 -m "gpu or interpret" tests
	$(BIN)/python tools/fuzz.py --device cuda --processes 8 --cases 5000
check: .venv/ready  ## style, types, import rules
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(BIN)/python -m pytest tests/test_import_rules.py
format: .venv/ready  ## put the code into house style
	$(BIN)/ruff check --fix . ; $(BIN)/ruff format .
bench: .venv/ready  ## kernels and engine beside their peers
	$(BIN)/python -m benchmarks run
fuzz: .venv/ready  ## 50 000 random attention problems against float64
	$(BIN)/python tools/fuzz.py --cases 50000
clean:  ## forget the environment and every cache
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis && find src -name __pycache__ -prune -exec rm -rf {} +
.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv && $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]' && touch .venv/ready
.PHONY: demo test test-gpu check format bench fuzz clean
