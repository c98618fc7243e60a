"""Every example runs, and what it claims is checked."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from pagetile import LLM, SamplingParams
from pagetile.demo import path

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture
def example(monkeypatch):
    def load(name):
        spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)  # where dataclasses look
        spec.loader.exec_module(module)
        return module

    return load


def test_the_mini_engine_says_what_the_engine_says(example):
    mini = example("mini_engine")
    engine = mini.Engine(mini.Llama(path()), num_blocks=24)
    llm = LLM(dtype="float32", num_blocks=64)
    common = "class Reader:\n    def __init__(self, path):\n        self.path = path\n\n    def "
    prompts = [
        llm.engine.inputs.encode(common + name) for name in ("open", "close", "read", "lines")
    ]
    first = engine.add(prompts[0], 20)
    while engine.running or engine.waiting:
        engine.step()
    later = [engine.add(prompt, 20) for prompt in prompts[1:]]
    while engine.running or engine.waiting:
        engine.step()
    expected = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    for sequence, result in zip([first, *later], expected, strict=True):
        assert tuple(sequence.new) == result.outputs[0].token_ids
    assert all(sequence.num_cached == len(prompts[0]) // 16 * 16 > 0 for sequence in later)
    engine.pool.check([])


@pytest.mark.parametrize(
    ("name", "printed"),
    [
        ("mini_engine", "16 prompt tokens were cached"),
        ("cache_policy", "500 tokens read, 68 in 5 blocks; 3 of 8 blocks are free"),
        ("shared_prefixes", "32 sequences over 8192 shared tokens"),
        pytest.param("eight_bit_cache", "float8_e5m2", marks=pytest.mark.slow),  # compiles kernels
    ],
)
def test_an_example_runs(example, name, printed, capsys):
    example(name).main()
    assert printed in capsys.readouterr().out


def test_an_eight_bit_cache_is_a_quarter_as_large_and_nearly_as_exact(example):
    attend = example("eight_bit_cache").attend
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 8, 64), torch.randn(1000, 2, 64), torch.randn(1000, 2, 64)
    exact, num_bytes = attend(torch.float32, q, k, v)
    packed, num_packed = attend(torch.int8, q, k, v)
    assert (packed - exact).norm() < 0.02 * exact.norm()
    assert num_packed < 0.3 * num_bytes


def test_pages_chosen_by_bounds_are_better_than_random_ones(example, capsys):
    example("top_k_pages").main()
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert all(float(chosen) < 0.7 * float(random) for _, chosen, random in rows[:2])
    assert float(rows[-1][1]) < 1e-5  # all pages
