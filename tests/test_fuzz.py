"""The trials of ``tools/fuzz_operations.py`` run, and find a result that is wrong."""

import random

import pytest
import torch
from tools import fuzz_operations
from tools.fuzz_operations import OPERATIONS

SEEDS = {"cpu": range(6), "triton": range(2)}
TRIALS = [
    pytest.param(name, impl, marks=[pytest.mark.interpret] if impl == "triton" else [])
    for name, (_, impls) in OPERATIONS.items()
    for impl in impls
]
FUNCTIONS = {
    "fused_rows": ("rms_norm", "add_norm", "gated_activation", "take_rows", "rotate"),
    "moe": ("moe_experts",),
    "rotary_write": ("rotate_and_write",),
    "small_linear": ("small_linear", "partial_products"),
    "shifted_windows": ("shifted_window_attention",),
    "vllm_attention": ("paged_attention_v1", "paged_attention_v2"),
    "vllm_cache": ("reshape_and_cache",),
}


def is_right(name, impl):
    """Whether the errors of a few cases are allowed."""
    trials = (OPERATIONS[name][0](random.Random(f"{name}-{seed}"), impl) for seed in SEEDS[impl])
    return all(ratio <= 1 for ratios in trials for ratio in ratios.values())


@pytest.mark.parametrize(("name", "impl"), TRIALS)
def test_trials_run_and_find_nothing(name, impl):
    assert is_right(name, impl)


@pytest.mark.parametrize(("name", "impl"), TRIALS)
def test_a_wrong_result_is_found(name, impl, monkeypatch):
    for function in FUNCTIONS.get(name, (name,)):
        owners = (fuzz_operations, fuzz_operations.pagetile, fuzz_operations.vllm_ops)
        owner = next(owner for owner in owners if hasattr(owner, function))
        monkeypatch.setattr(owner, function, spoil(getattr(owner, function)))
    assert not is_right(name, impl)


def spoil(function):
    """The function, whose results are a tenth too large unless the reference computes them."""

    def wrong(*args, **options):
        if options.get("impl") == "reference":
            return function(*args, **options)
        out = function(*args, **options)
        if out is None:  # it writes to its arguments: the tensors of the first one
            written = (
                args[2:4] if function.__name__ in ("write_kv", "reshape_and_cache") else args[:1]
            )
            for tensor in flatten(written):
                tensor.mul_(3) if tensor.dtype.itemsize > 1 else tensor.view(torch.uint8).add_(1)
            return None
        if isinstance(out, torch.Tensor):
            return out * 1.1
        larger = [part if part is None else part * 1.1 for part in out]
        return type(out)(*larger) if hasattr(out, "_fields") else tuple(larger)

    return wrong


def flatten(tensors):
    for each in tensors:
        if isinstance(each, torch.Tensor):
            yield each
        else:
            yield from flatten(each)
