"""Which steps are recorded as graphs, with stand-ins for CUDA graphs."""

from contextlib import contextmanager, nullcontext

import pytest
import torch

from pagetile.engine import cuda_graphs
from pagetile.engine.cuda_graphs import StepGraphs


class FakeGraph:
    def replay(self):
        pass


@pytest.fixture
def tried(monkeypatch):
    """Sizes that are tried; steps of 4 and more make the host wait."""
    sizes, is_refusing = [], False

    @contextmanager
    def refusing():
        nonlocal is_refusing
        is_refusing = True
        try:
            yield
        finally:
            is_refusing = False

    def step(size, *form):
        if not is_refusing:
            return size
        sizes.append(size)
        if size >= 4:
            raise RuntimeError("called a synchronizing CUDA operation")
        return size

    monkeypatch.setattr(cuda_graphs, "refusing_to_wait", refusing)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(cuda_graphs, "_capture_stream", lambda device: None)
    return sizes, step


def test_only_sizes_whose_step_waits_are_not_recorded(tried):
    sizes, step = tried
    graphs = StepGraphs(step, lambda size: None, [1, 2, 4, 8], pool=0)
    for _ in range(2):
        assert [graphs.ensure(size, True) for size in (8, 4, 2, 1)] == [False, False, True, True]
    assert sizes == [8, 4, 2, 1], "each is tried once"
    assert graphs.recorded_sizes == [1, 2]
    assert sorted(graphs.reasons) == [(4, True), (8, True)]
    assert graphs.has(2, True)
    assert not graphs.has(2, False)
    assert not graphs.has(8, True)
    assert graphs.replay(2, True) == 2
