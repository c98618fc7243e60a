"""Other libraries as peers: stand-ins compute attention from the arguments that they are given."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from benchmarks import libraries
from benchmarks.gpu_inputs import Inputs, Shape

from pagetile import PagedBatch, paged_attention

SHAPE = Shape(num_heads=4, num_kv_heads=2, head_size=32, block_size=8)
LENGTHS = (37, 8, 20)


def attend(q, k_cache, v_cache, tables, lengths, starts, *, softcap, causal=True):
    """A library's result; poison in a table would change it. A cap of 0.0 is none."""
    assert 0 <= int(tables.min()) <= int(tables.max()) < len(k_cache)
    longest = int((starts[1:] - starts[:-1]).max())
    batch = PagedBatch(tables, lengths, starts, longest, int(lengths.max()))
    how = {"causal": causal, "logits_soft_cap": softcap or None}
    if k_cache.dtype != q.dtype:
        how |= dict.fromkeys(("k_scale", "v_scale"), torch.ones(()))
    return paged_attention(q, k_cache, v_cache, batch, **how, impl="reference").out


def one_each(lengths):
    return torch.arange(len(lengths) + 1, dtype=torch.int32)


class FlashAttention2:
    @staticmethod
    def flash_attn_with_kvcache(
        q, k_cache, v_cache, *, cache_seqlens, block_table, causal, softcap
    ):
        keys = k_cache, v_cache, block_table, cache_seqlens
        return attend(q[:, 0], *keys, one_each(cache_seqlens), softcap=softcap)[:, None]

    @staticmethod
    def flash_attn_varlen_func(q, k, v, cu_q, cu_k, max_q, max_k, *, causal, block_table, softcap):
        lengths = cu_k[1:] - cu_k[:-1]
        assert (max_q, max_k) == (max(LENGTHS), max(LENGTHS))
        return attend(q, k, v, block_table, lengths, cu_q, causal=causal, softcap=softcap)


class FlashAttention3:
    @staticmethod
    def flash_attn_with_kvcache(
        q, k_cache, v_cache, *, cache_seqlens, page_table, causal, softcap, cu_seqlens_q=None,
        max_seqlen_q=None,
    ):  # fmt: skip
        keys = k_cache, v_cache, page_table, cache_seqlens
        if cu_seqlens_q is None:
            return attend(q[:, 0], *keys, one_each(cache_seqlens), softcap=softcap)[:, None]
        assert max_seqlen_q == max(LENGTHS)
        return attend(q, *keys, cu_seqlens_q, causal=causal, softcap=softcap)


class Wrapper:
    """FlashInfer's wrapper: it plans ragged lists of pages, then runs."""

    def __init__(self, workspace, layout, use_tensor_cores=True, backend="auto"):
        assert layout == "NHD"
        assert backend in ("auto", "fa2")

    def plan(self, *arrays, q_data_type, kv_data_type, logits_soft_cap, causal=True):
        *starts, indptr, indices, last, heads, kv_heads, size, block_size = arrays
        assert (heads, kv_heads, size, block_size) == (4, 2, 32, 8)
        assert 1 <= int(last.min()) <= int(last.max()) <= block_size
        lists = indices.tensor_split(indptr[1:-1].tolist())
        self.tables = torch.nn.utils.rnn.pad_sequence(lists, batch_first=True)
        self.lengths = (indptr[1:] - indptr[:-1] - 1) * block_size + last
        self.starts = starts[0] if starts else one_each(self.lengths)
        self.how = {"causal": causal, "softcap": logits_soft_cap}

    def run(self, q, caches, out):
        found = attend(q, *caches, self.tables, self.lengths, self.starts, **self.how)
        return out.copy_(found)


FlashInfer = SimpleNamespace(
    BatchDecodeWithPagedKVCacheWrapper=Wrapper, BatchPrefillWithPagedKVCacheWrapper=Wrapper
)


class VLLM:
    @staticmethod
    def unified_attention(
        *, q, k, v, out, cu_seqlens_q, max_seqlen_q, seqused_k, max_seqlen_k, softmax_scale,
        causal, window_size, block_table, softcap, q_descale, k_descale, v_descale,
    ):  # fmt: skip
        assert softmax_scale == 32**-0.5
        how = {"causal": causal, "softcap": softcap}
        out.copy_(attend(q, k, v, block_table, seqused_k, cu_seqlens_q, **how))


class VLLMFlashAttention3:
    """Checks that a schedule belongs to the call, and allows several calls with one."""

    @staticmethod
    def get_scheduler_metadata(
        batch_size, max_q, max_k, heads, kv_heads, size, seq_lens, dtype, v_size, starts, *,
        page_size, causal,
    ):  # fmt: skip
        assert (batch_size, max_k, causal) == (3, max(LENGTHS), True)
        assert (heads, kv_heads, size, v_size, page_size) == (4, 2, 32, 32, 8)
        assert max_q == int((starts[1:] - starts[:-1]).max())
        return seq_lens

    @staticmethod
    def flash_attn_varlen_func(
        q, k, v, *, max_seqlen_q, cu_seqlens_q, max_seqlen_k, seqused_k, causal, fa_version,
        softmax_scale, block_table, out, scheduler_metadata,
    ):  # fmt: skip
        assert (fa_version, softmax_scale) == (3, 32**-0.5)
        assert scheduler_metadata is None or torch.equal(scheduler_metadata, seqused_k)
        found = attend(q, k, v, block_table, seqused_k, cu_seqlens_q, softcap=0.0, causal=causal)
        return out.copy_(found)


UNCAPPED = {"vllm flash_attn 3", "vllm flash_attn 3 scheduled"}
STAND_INS = {
    **dict.fromkeys(UNCAPPED, VLLMFlashAttention3),
    "flashinfer": FlashInfer,
    "flash_attn": FlashAttention2,
    "flash_attn 3": FlashAttention3,
    "vllm triton": VLLM,
}


def install(monkeypatch, stand_ins):
    """Make these libraries importable, and no others."""
    for name, (module, _) in libraries._LIBRARIES.items():
        if name in stand_ins:
            monkeypatch.setitem(sys.modules, module, stand_ins[name])
    there = {libraries._LIBRARIES[name][0].partition(".")[0] for name in stand_ins}
    monkeypatch.setattr(libraries, "find_spec", lambda module: module if module in there else None)


class BatchAttention:
    """FlashInfer's: it raises until the workspace is large enough."""

    def __init__(self, layout, device):
        assert layout == "NHD"
        self.float_workspace_buffer = torch.empty(8, dtype=torch.uint8, device=device)

    def plan(self, starts, indptr, indices, lengths, *sizes, causal, logits_soft_cap, **types):
        if self.float_workspace_buffer.numel() < 100:
            raise RuntimeError("Buffer overflow. Increase the workspace buffer size.")
        lists = indices.tensor_split(indptr[1:-1].tolist())
        self.arrays = torch.nn.utils.rnn.pad_sequence(lists, batch_first=True), lengths, starts
        self.how = {"causal": causal, "softcap": logits_soft_cap}

    def run(self, q, caches, out, lse, logits_soft_cap):
        out.copy_(attend(q, *caches, *self.arrays, **self.how))


def test_batch_attention_gets_the_workspace_that_it_asks_for(monkeypatch):
    library = SimpleNamespace(**vars(FlashInfer), BatchAttention=BatchAttention)
    install(monkeypatch, {"flashinfer": library})
    monkeypatch.setattr(libraries, "_LARGER_WORKSPACE", 100)
    monkeypatch.setattr(libraries, "_BATCH_ATTENTION_SIZES", (32,))
    inputs = Inputs(LENGTHS, SHAPE, decode=False, device="cpu")
    found, _ = libraries.find_libraries(inputs)
    error = inputs.rows().error(found["flashinfer BatchAttention"]())
    assert error < 0.01
    monkeypatch.setattr(libraries, "_LARGER_WORKSPACE", 99)
    _, absent = libraries.find_libraries(inputs)
    assert absent["flashinfer BatchAttention"].endswith("Increase the workspace buffer size.")


@pytest.mark.parametrize("decode", [True, False])
@pytest.mark.parametrize("cap", [None, 0.5])
def test_every_library_is_handed_the_same_problem(monkeypatch, decode, cap):
    install(monkeypatch, STAND_INS)
    shape = replace(SHAPE, logits_soft_cap=cap)
    inputs = Inputs(LENGTHS, shape, decode=decode, device="cpu")
    found, absent = libraries.find_libraries(inputs)
    # FlashInfer's decode wrapper chooses this kernel by itself.
    there = STAND_INS.keys() | (set() if decode else {"flashinfer fa2"})
    assert found.keys() == (there if cap is None else there - UNCAPPED)
    assert all(absent[name].endswith("not tried") for name in UNCAPPED if cap is not None)
    expected = inputs.attend(impl="reference").out
    for call in found.values():
        torch.testing.assert_close(call(), expected)


def test_a_peer_that_is_not_installed_is_left_out(monkeypatch):
    install(monkeypatch, {"flash_attn": FlashAttention2})
    inputs = Inputs(LENGTHS, SHAPE, decode=True, device="cpu")
    found, absent = libraries.find_libraries(inputs)
    assert list(found) == ["flash_attn"]
    assert absent["flashinfer"] == "not installed"


def test_a_library_that_refuses_is_named_with_its_reason(monkeypatch):
    def refuse(*_, **__):
        raise ValueError("blocks of 8 are too small")

    refusing = SimpleNamespace(BatchDecodeWithPagedKVCacheWrapper=refuse)
    install(monkeypatch, {"flashinfer": refusing})
    found, absent = libraries.find_libraries(Inputs(LENGTHS, SHAPE, decode=True, device="cpu"))
    assert found == {}
    assert absent["flashinfer"] == "unsupported: blocks of 8 are too small"


@pytest.mark.parametrize("decode", [True, False])
def test_one_is_handed_caches_of_eight_bits_without_scales(monkeypatch, decode):
    install(monkeypatch, STAND_INS)
    shape = Shape(4, 2, 32, 8, torch.float8_e4m3fn, "head")
    inputs = Inputs(LENGTHS, shape, decode=decode, device="cpu")
    ((name, call),) = libraries.find_libraries(inputs)[0].items()
    assert name == "flashinfer"
    scales = inputs.scales["v_scale"].repeat_interleave(2)[:, None]
    expected = inputs.attend(impl="reference").out
    torch.testing.assert_close(call() * scales, expected, atol=2e-2, rtol=2e-2, check_dtype=False)


def test_scales_of_tokens_have_no_peers(monkeypatch):
    install(monkeypatch, STAND_INS)
    shape = Shape(4, 2, 32, 8, torch.float8_e4m3fn, "token")
    found, absent = libraries.find_libraries(Inputs(LENGTHS, shape, decode=True, device="cpu"))
    assert found == {}
    assert set(absent.values()) == {"unsupported: a scale for each token"}
