"""Set before torch starts its threads, and which tests this process can run.

::

    marked                      on any machine    TRITON_INTERPRET=1    on a machine with a GPU
    nothing                     runs                                    runs
    interpret: Triton kernels                     runs, on the CPU      runs, compiled
    gpu                                                                 runs

Slow tests run only by name: ``pytest -m slow``.
"""

import gc
import os
from collections import Counter
from contextlib import contextmanager

import pytest

# Tests run in parallel, and threads that spin would take cores from each other.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# A full collection visits all modules and tests: a tenth of the tests' time with Python's default
# thresholds, which suit small programs.
gc.set_threshold(10_000, 20, 20)

# Sorted by the CPU time that they take without compiled kernels of Numba and Triton; all others
# take 50 s at most.
LONGEST = (
    "tests/ops/test_paged_attention.py",
    "tests/ops/test_hopper_compile.py",
    "tests/test_interpreter.py",  # loads kernels that the first of these compiles
    "tests/ops/test_paged_attention_compiled.py",
    "tests/ops/test_attention_compiled.py",
)
LEFT_OUT = pytest.StashKey[dict]()
REASONS = {
    "slow": "they take minutes; run them with -m slow",
    "gpu": "they need a GPU; make test-gpu runs them",
    "interpret": "tests/test_interpreter.py runs them with TRITON_INTERPRET=1, or a GPU",
}
COMPILED = "they run without TRITON_INTERPRET=1"
COMPILED_ELSEWHERE = "tests/engine/test_kv_cache_dtype.py"

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETING:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch reads it: no test is for a GPU


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
    kept, left, reasons = [], [], Counter()
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
        if not is_wanted:
            reasons[next(filter(item.get_closest_marker, REASONS), "compiled")] += 1
    # Two files run at a time: the longest start first, and files that would compile the same
    # kernels start last, after others have compiled them.
    places = {path: at for at, path in enumerate(LONGEST)}
    kept.sort(
        key=lambda item: (
            item.nodeid.startswith(COMPILED_ELSEWHERE),
            places.get(item.nodeid.partition("::")[0], len(places)),
        )
    )
    items[:] = kept
    config.hook.pytest_deselected(items=left)
    config.stash[LEFT_OUT] = dict(reasons)


def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = session.config.stash.get(LEFT_OUT, {})


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    node.config.stash[LEFT_OUT] = getattr(node, "workeroutput", {}).get("left_out", {})


def pytest_terminal_summary(terminalreporter, config):
    """Say which tests did not run here, and why."""
    for name, number in sorted(config.stash.get(LEFT_OUT, {}).items()):
        terminalreporter.write_line(f"{number} tests left out: {REASONS.get(name, COMPILED)}")


@pytest.fixture(scope="module", autouse=True)
def _what_lives_as_long_as_the_process_is_not_looked_through_for_garbage():
    """A full collection takes seconds with all modules and tests, and some tests run many.

    A test with a server undoes this: the server unfreezes everything when it ends.
    """
    if not gc.get_freeze_count():
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _models_are_on_the_cpu_unless_a_test_says_where():
    """On a machine with a GPU, too, where every one would record its steps."""
    if not has_gpu():
        yield
        return
    import torch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pagetile.engine.loading.default_device", lambda: torch.device("cpu"))
        yield


@pytest.fixture(scope="session")
def mirror():
    return mirrored


@contextmanager
def mirrored(*tensors, impl, rounds=True):
    """The tensors where ``impl`` can run; what is written to them there comes back.

    Views of one memory stay views of one memory, with their strides. What only copies numbers,
    and ``rounds`` none, is right for bfloat16 under the interpreter, too.
    """
    import torch  # after the environment above is set

    on_gpu = impl == "triton" and torch.cuda.is_available()
    rounded_wrongly = (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
    is_wrong = any(tensor.dtype in rounded_wrongly for tensor in tensors)
    if impl == "triton" and not on_gpu and rounds and is_wrong:
        pytest.skip("Triton 3.6's interpreter does not round to bfloat16 and float8 as a GPU does")
    if not on_gpu:
        yield tensors
        return
    homes = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}
    memories = {
        at: torch.tensor([], dtype=torch.uint8).set_(tensor.untyped_storage()).cuda()
        for at, tensor in homes.items()
    }
    there = {  # one tensor that is given twice stays one
        id(tensor): torch.tensor([], dtype=tensor.dtype, device="cuda").set_(
            memories[tensor.untyped_storage().data_ptr()].untyped_storage(),
            tensor.storage_offset(),
            tensor.shape,
            tensor.stride(),
        )
        for tensor in tensors
    }
    yield tuple(there[id(tensor)] for tensor in tensors)
    for at, tensor in homes.items():
        home = torch.tensor([], dtype=torch.uint8).set_(tensor.untyped_storage())
        home.copy_(memories[at])


if INTERPRETING:
    from fast_interpreter import hasten

    hasten()
