PYTHON ?= python3
BIN := .venv/bin
QUICK := tests/kv_cache tests/ops/test_paged_attention_checks.py tests/ops/test_attention_checks.py tests/ops/test_dispatch.py \
	tests/ops/test_window_geometry.py tests/engine/test_sampling_params.py tests/engine/test_detokenizer.py tests/engine/test_sampler.py \
	tests/analysis tests/test_device.py tests/test_public_api.py tests/test_import_rules.py tests/test_words.py tests/engine/test_scheduler.py tests/ops/test_paged_attention_plan.py

# Where nothing may write bytecode, every process of the tests compiles all modules again.
export PYTHONDONTWRITEBYTECODE :=

demo: .venv/ready  ## continue two prompts with a common prefix, and show their cache blocks
	@$(BIN)/python -m pagetile generate --n 2 --max-tokens 24 --block-size 4 --num-blocks 64 --temperature 0.7 --show-pages \
		"def read_json(path, default=None):" "def read_json(path, default=None, encoding=None):"
test: .venv/ready  ## the check and all tests that a CPU can run, two files at a time
	@$(MAKE) -j 2 check suite
suite: .venv/ready
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --ignore tests/test_import_rules.py
test-gpu: .venv/ready  ## tests of kernels and engine on this machine's GPU, then 5 000 random problems
	$(BIN)/python -m pytest -n 8 -m "gpu or interpret" tests
	$(BIN)/python tools/fuzz.py --device cuda --processes 8 --cases 5000
test-swin: .venv-swin/ready  ## Swin models of timm and torchvision too, in an environment that has them
	.venv-swin/bin/python -m pytest -rs tests/integrations/test_swin_*.py
test-clients: .venv-clients/ready  ## LangChain, instructor, lm-eval, guidellm and schemathesis against the server
	.venv-clients/bin/python -m pytest -W default tests/clients
check: .venv/ready  ## ruff, mypy and the import rules
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(BIN)/python -m pytest tests/test_import_rules.py
quick: .venv/ready  ## argument checks, cache and scheduler in a minute: no kernel is compiled
	$(BIN)/python -m pytest -n 2 -m "not slow" $(QUICK)
docs: .venv/docs-ready  ## build the site into site/, offline and strictly
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
format: .venv/ready  ## ruff's fixes and format
	$(BIN)/ruff check --fix . ; $(BIN)/ruff format .
bench: .venv/ready  ## time kernels and engine beside their peers
	$(BIN)/python -m benchmarks run
fuzz: .venv/ready  ## 50 000 random attention problems against float64
	$(BIN)/python tools/fuzz.py --cases 50000
clean:  ## remove the environments and caches
	rm -rf .venv .venv-swin .venv-clients .mypy_cache .ruff_cache .pytest_cache .hypothesis && find src -name __pycache__ -prune -exec rm -rf {} +
.venv/ready: pyproject.toml constraints.txt
	@echo "Installing into .venv, about two minutes"
	$(PYTHON) -m venv .venv && $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]' && touch .venv/ready
.venv-swin/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-swin && .venv-swin/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[swin-test]' && touch .venv-swin/ready
.venv/docs-ready: .venv/ready
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[docs]' && touch .venv/docs-ready
.venv-clients/ready: pyproject.toml constraints-clients.txt
	$(PYTHON) -m venv .venv-clients && .venv-clients/bin/python -m pip install -q --disable-pip-version-check -c constraints-clients.txt -e '.[clients]' && touch .venv-clients/ready
.PHONY: demo test suite quick test-gpu test-swin test-clients check docs format bench fuzz clean
