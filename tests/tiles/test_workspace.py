"""Workspaces of GPU kernels, with a simulated GPU: which memory each call gets."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: no GPU kernels")

from pagetile.tiles.triton import workspace


class Gpus:
    """Two devices, each with a current stream, which may be capturing."""

    def __init__(self):
        self.current = 0
        self.streams = {0: 70, 1: 71}
        self.capturing = set()

    def is_capturing(self):
        return self.streams[self.current] in self.capturing


@pytest.fixture
def gpus(monkeypatch):
    gpus = Gpus()
    monkeypatch.setattr(workspace, "_made", {})
    monkeypatch.setattr(workspace, "_outgrown", [])
    monkeypatch.setattr(
        workspace, "_allocate", lambda device, sizes: tuple(torch.zeros(size) for size in sizes)
    )
    monkeypatch.setattr(
        torch._C, "_cuda_getCurrentRawStream", lambda index: gpus.streams[index], raising=False
    )
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", gpus.is_capturing)
    return gpus


def borrow(*sizes, index=0):
    return workspace.borrow(index, sizes)


def test_a_stream_has_one_workspace_that_grows(gpus):
    small = borrow(10, 10, 10)
    assert borrow(1024, 1, 1024) is small
    large = borrow(5000, 10, 10)
    assert [len(lot) for lot in large] == [8192, 1024, 1024]
    assert borrow(10, 10, 10) is large
    gpus.streams[0] = 80
    assert borrow(10, 10, 10) is not large


def test_graphs_share_one_that_eager_calls_have_made(gpus):
    eager = borrow(10, 10, 10)
    gpus.capturing.add(70)
    captured = borrow(10, 10, 10)
    assert captured is not eager
    gpus.streams[0] = 80
    gpus.capturing.add(80)
    assert borrow(10, 10, 10) is captured
    assert borrow(5000, 10, 10) is not borrow(5000, 10, 10)  # too large: each capture has its own


def test_what_a_graph_was_captured_with_is_kept(gpus):
    borrow(10, 10, 10)
    gpus.capturing.add(70)
    captured = borrow(10, 10, 10)
    gpus.capturing.clear()
    borrow(5000, 10, 10)
    assert any(memory is captured for memory in workspace._outgrown)


def test_a_device_has_its_own(gpus):
    eager = borrow(10, 10, 10)
    gpus.current = 1
    other = borrow(10, 10, 10, index=1)
    assert other is not eager
    gpus.capturing.add(71)
    assert borrow(10, 10, 10, index=1) is not other
