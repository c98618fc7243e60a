"""How many files, and names of tensors, a repeated call passes through on the host."""

import sys
from collections import defaultdict
from pathlib import Path

import pytest
import torch

import pagetile
from pagetile import PagedBatch, paged_attention
from pagetile.ops.paged_attention import api

PACKAGE = str(Path(pagetile.__file__).parent)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def follow(tensor, function):
    """Call a function; return the package's local variables that were a tensor, by file."""
    found = defaultdict(set)
    address = tensor.data_ptr()

    def look(frame, event, _):
        for name, value in frame.f_locals.items():
            if isinstance(value, torch.Tensor) and value.data_ptr() == address:
                found[frame.f_code.co_filename.removeprefix(PACKAGE)].add(name)
        return look

    def enter(frame, event, argument):
        return look if frame.f_code.co_filename.startswith(PACKAGE) else None

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        function()
    finally:
        sys.settrace(before)
    return found


@pytest.mark.parametrize(
    "impl", ["cpu", "reference", pytest.param("triton", marks=pytest.mark.interpret)]
)
def test_a_first_call_passes_its_cache_through_six_files_under_three_names(impl):
    device = DEVICE if impl == "triton" else "cpu"
    k_cache, v_cache = torch.randn(2, 4, 16, 2, 64, device=device).unbind(0)

    def attend(num_seqs):
        batch = PagedBatch.of([[0]] * num_seqs, [9] * num_seqs, device=device)
        q = torch.randn(num_seqs, 8, 64, device=device)
        return paged_attention(q, k_cache, v_cache, batch, impl=impl)

    attend(1)  # imports and compiles
    misses = api._dispatch.cache_info().misses
    found = follow(k_cache, lambda: attend(3))
    assert api._dispatch.cache_info().misses == misses + 1  # nothing was remembered
    assert "/ops/paged_attention/api.py" in found
    assert len(found) <= 6, sorted(found)
    names = set().union(*found.values())
    assert "k_cache" in names
    assert len(names) <= 3, names


def test_a_file_and_a_name_are_found():
    x = torch.randn(3, 8)
    found = follow(x, lambda: pagetile.shapes.form(x))
    assert found == {"/shapes.py": {"tensor"}}
    assert follow(x.clone(), lambda: pagetile.shapes.form(x)) == {}
