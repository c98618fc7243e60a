"""Set before torch starts its threads, and which tests this process can run.

::

    marked                      on any machine    TRITON_INTERPRET=1    on a machine with a GPU
    nothing                     runs                                    runs
    interpret: Triton kernels                     runs, on the CPU      runs, compiled
    gpu                                                                 runs

Slow ones wait on every machine until they are named: ``pytest -m slow``.
"""

import os

import pytest

# Tests share their cores, and spinning threads do not.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

LONGEST = ("tests/test_interpreter.py", "tests/ops/test_paged_attention.py")
COMPILED_ELSEWHERE = "tests/engine/test_kv_cache_dtype.py"

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETING:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch looks: nothing is for a GPU


def has_gpu():
    import torch

    return torch.cuda.is_available()


def pytest_configure(config):
    wanted = config.option.markexpr
    if "gpu" in wanted and "not gpu" not in wanted and not has_gpu():
        raise pytest.UsageError(f"-m {wanted!r}: there is no CUDA device here that torch can use")


def pytest_collection_modifyitems(config, items):
    """Triton decides when a kernel is imported whether it is interpreted: all tests or none."""
    on_gpu = has_gpu()
    with_slow = "slow" in config.option.markexpr
    kept, left = [], []
    for item in items:
        if item.get_closest_marker("gpu"):
            is_wanted = on_gpu
        elif item.get_closest_marker("interpret"):
            is_wanted = INTERPRETING or on_gpu
        else:
            is_wanted = not INTERPRETING
        if item.get_closest_marker("slow"):
            is_wanted &= with_slow
        (kept if is_wanted else left).append(item)
    # Two files run at a time: whoever takes minutes begins first, so that nobody waits at the end,
    # and whoever would compile what the other is about to compile comes last.
    kept.sort(
        key=lambda item: (
            not item.nodeid.startswith(LONGEST),
            item.nodeid.startswith(COMPILED_ELSEWHERE),
        )
    )
    items[:] = kept
    config.hook.pytest_deselected(items=left)


if INTERPRETING:
    from triton.runtime import interpreter

    _patch_tensor = interpreter._patch_lang_tensor

    def _patch_lang_tensor(tensor, scope):
        """Triton 3.6 takes int() of an array of one number, which NumPy 2.4 refuses."""
        _patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = _patch_lang_tensor
