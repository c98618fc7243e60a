"""vLLM's paged attention over x-packed caches: exact, poison-safe, by partitions of 512."""

import inspect
import os
from dataclasses import replace

import pytest
import torch
from vllm_cases import (
    BF16,
    E4M3,
    E5M2,
    F16,
    F32,
    PARTITION,
    assert_right,
    decode_case,
    dense_scores,
    make_call,
    random_cases,
)

from pagetile.integrations import vllm_ops
from pagetile.testing import poisoned_memory

IMPLEMENTATIONS = ["cpu", pytest.param("triton", marks=pytest.mark.interpret)]
INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
LENGTHS = (1, 130, 37) if INTERPRETING else (1, 700, 37, 1030)

CASES = [
    decode_case(LENGTHS),
    decode_case(LENGTHS, has_alibi=True),
    decode_case(LENGTHS, softmax_scale=0.0),
    decode_case(LENGTHS, num_heads=2),
    decode_case(LENGTHS, num_heads=14, dtype=F16),
    decode_case((65, 33), num_heads=48, num_kv_heads=1, dtype=F16),
    decode_case(LENGTHS, head_size=80, block_size=8, dtype=F16),
    decode_case(LENGTHS, head_size=120, block_size=32, dtype=F16),
    decode_case((128, 129), head_size=8, block_size=128, dtype=F16),
    decode_case(LENGTHS, head_size=256, block_size=16, dtype=F16),
    decode_case(LENGTHS, block_size=256),
    decode_case(LENGTHS, dtype=BF16),
    decode_case(LENGTHS, dtype=BF16, head_size=128, has_alibi=True),
    *(
        decode_case(LENGTHS, dtype=dtype, kv_dtype=kv_dtype, scales="tensor", head_size=size)
        for dtype, kv_dtype, size in (
            (F16, E4M3, 64),
            (F16, E5M2, 96),
            (F32, E4M3, 128),
            (F32, E4M3, 16),  # one chunk: its stride may be anything
            (BF16, E4M3, 128),
            (BF16, E5M2, 64),
        )
    ),
]


# Caches of 8 bits that every run compiles CPU kernels for, 5 seconds each: each type once, and each
# 16-bit type of queries. ``pytest -m slow`` runs the others too.
EVERYDAY = {F16: E5M2, BF16: E4M3}


def everyday(case):
    """The case with a cache that every run compiles a kernel for."""
    if case.kv_dtype is None or EVERYDAY.get(case.dtype) == case.kv_dtype:
        return case
    kv_dtype = EVERYDAY.get(case.dtype)
    return replace(case, kv_dtype=kv_dtype, scales=case.scales if kv_dtype else None)


CPU_CASES = [
    pytest.param(case, "cpu", marks=[pytest.mark.slow] * (everyday(case) != case)) for case in CASES
]
TRITON_CASES = [pytest.param(case, "triton", marks=pytest.mark.interpret) for case in CASES]


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(("case", "impl"), [*CPU_CASES, *TRITON_CASES], ids=str)
def test_results_are_the_oracles(case, impl, version, mirror):
    call = make_call(case)
    with poisoned_memory():
        call.run(vllm_ops, version, mirror, impl)
    assert_right(call)


@pytest.mark.parametrize("case", [everyday(case) for case in random_cases(40)], ids=str)
def test_random_cases(case, mirror):
    for version in (1, 2):
        call = make_call(case)
        with poisoned_memory():
            call.run(vllm_ops, version, mirror, "cpu")
        assert_right(call)


@pytest.mark.interpret
@pytest.mark.skipif(INTERPRETING, reason="hundreds of cases take the interpreter too long")
@pytest.mark.parametrize("seed", range(0, 300, 10))
def test_random_cases_on_a_gpu(seed, mirror):
    for case in random_cases(10, first=1000 + seed):
        for version in (1, 2):
            call = make_call(case)
            call.run(vllm_ops, version, mirror, "triton")
            assert_right(call)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize(("dtype", "alibi"), [(F32, True), (F16, False)], ids=str)
def test_partitions_are_written_as_far_as_a_sequence_goes(dtype, alibi, impl, mirror):
    call = make_call(decode_case((1, 512, 513), dtype=dtype, has_alibi=alibi))
    call.run(vllm_ops, 2, mirror, impl)
    exp_sum, max_logits, tmp_out = call.partitions
    for seq, length in enumerate(call.seq_lens.tolist()):
        used = -(-length // PARTITION)
        assert exp_sum[seq, :, used:].isnan().all()
        assert max_logits[seq, :, used:].isnan().all()
        assert tmp_out[seq, :, used:].isnan().all()
        if not length:
            continue
        s, v = dense_scores(call, seq)
        for part in range(used):
            keys = slice(part * PARTITION, (part + 1) * PARTITION)
            highest = s[:, keys].max(-1).values
            p = (s[:, keys] - highest[:, None]).exp()
            rows = (p / p.sum(-1, keepdim=True))[:, None] @ v[:, keys]
            near = {"rtol": 2e-3 if dtype == F16 else 1e-5, "atol": 2e-3 if dtype == F16 else 1e-5}
            torch.testing.assert_close(max_logits[seq, :, part].double(), highest, **near)
            torch.testing.assert_close(exp_sum[seq, :, part].double(), p.sum(-1), **near)
            torch.testing.assert_close(tmp_out[seq, :, part].double(), rows[:, 0], **near)


def sees(head, kv_head, key, length, block_size, sparse, num_heads, num_kv_heads):
    """The documents' rule, one key at a time, with Python's integers."""
    step = sparse["blocksparse_head_sliding_step"]
    rank, size = sparse["tp_rank"], sparse["blocksparse_block_size"]
    shift = (rank * num_heads + head) * step if step >= 0 else (
        (rank * num_kv_heads + kv_head) * -step
    )  # fmt: skip
    block = key // block_size * block_size // size
    is_remote = (block + shift + 1) % sparse["blocksparse_vert_stride"] == 0
    return is_remote or block > (length - 1) // size - sparse["blocksparse_local_blocks"]


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("step", "rank", "local", "stride", "size"),
    [(0, 0, 1, 4, 64), (1, 0, 2, 3, 32), (-1, 1, 1, 5, 16), (2, 3, 0, 3, 64), (1, 0, 0, 8, 24)],
)
def test_block_sparse(step, rank, local, stride, size, impl, version, mirror):
    case = decode_case((1, 100, 530), num_kv_heads=2, num_heads=6)
    call = make_call(case)
    sparse = {
        "tp_rank": rank, "blocksparse_local_blocks": local, "blocksparse_vert_stride": stride,
        "blocksparse_block_size": size, "blocksparse_head_sliding_step": step,
    }  # fmt: skip
    call.run(vllm_ops, version, mirror, impl, **sparse)
    hidden = 0
    for seq, length in enumerate(call.seq_lens.tolist()):
        if not length:
            assert not call.out[seq].any()
            continue
        s, v = dense_scores(call, seq)
        for head in range(6):
            seen = torch.tensor([
                sees(head, head // 3, key, length, case.block_size, sparse, 6, 2)
                for key in range(length)
            ])  # fmt: skip
            hidden += int((~seen).sum())
            weights = s[head].masked_fill(~seen, -torch.inf).softmax(-1)
            expected = weights @ v[head] if seen.any() else torch.zeros(64, dtype=torch.float64)
            torch.testing.assert_close(call.out[seq, head].double(), expected, rtol=1e-5, atol=1e-5)
    assert hidden


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_blocks_that_no_head_sees_are_not_read(impl, mirror):
    """Table entries there may be garbage on a GPU; the blocks may hold NaN anywhere."""
    call = make_call(decode_case((256,), num_kv_heads=1, num_heads=3))
    sparse = {"blocksparse_local_blocks": 1, "blocksparse_vert_stride": 4}
    for block in call.tables[call.seq_lens == 256][0, 4:8]:  # sparse block 1 of 4: remote is 3
        call.key_cache[block], call.value_cache[block] = torch.nan, torch.nan
    call.run(vllm_ops, 1, mirror, impl, **sparse)
    assert not call.out.isnan().any()


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_nan_in_a_key_that_is_seen_shows(impl, mirror):
    call = make_call(decode_case((40,)))
    seq = int(call.seq_lens.argmax())
    call.key_cache[call.tables[seq, 1], 0, 2, 5, 1] = torch.nan
    call.run(vllm_ops, 1, mirror, impl)
    assert call.out[seq, :4].isnan().all()
    assert not call.out[seq, 4:].isnan().any()


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_strided_queries_results_and_caches(impl, mirror):
    call = make_call(decode_case((20, 90), num_kv_heads=2, num_heads=4))
    num_seqs, heads, size = call.query.shape
    call.query = (
        torch.stack([call.query, call.query * 0], 1).flatten(2).view(num_seqs, 2, heads, size)[:, 0]
    )
    call.out = torch.full((num_seqs, 3, heads, size), torch.nan)[:, 1]
    both = torch.stack([call.key_cache.flatten(2), call.value_cache.flatten(2)], 1)
    call.key_cache = both[:, 0].view(call.key_cache.shape)
    call.value_cache = both[:, 1].view(call.value_cache.shape)
    assert not call.key_cache.is_contiguous()
    call.run(vllm_ops, 1, mirror, impl)
    assert_right(call)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_scales_are_not_read_without_8_bits_and_may_be_numbers_with_them(impl, mirror):
    call = make_call(decode_case((40,)))
    call.k_scale, call.v_scale = torch.tensor(torch.nan), torch.tensor(torch.nan)
    call.run(vllm_ops, 1, mirror, impl)
    assert_right(call)
    call = make_call(decode_case((40,), dtype=F16, kv_dtype=E5M2, scales="tensor"))
    with mirror(
        call.out,
        call.query,
        call.key_cache,
        call.value_cache,
        call.tables,
        call.seq_lens,
        impl=impl,
    ) as (out, query, k, v, tables, lengths):
        vllm_ops.paged_attention_v1(
            out, query, k, v, 2, 0.125, tables, lengths, 16, 1040, None, "fp8_e5m2",
            float(call.k_scale), float(call.v_scale),
        )  # fmt: skip
    assert_right(call)


def test_results_do_not_depend_on_the_number_of_threads(mirror):
    results = []
    before = torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        call = make_call(decode_case((3000, 5, 900), num_heads=32, num_kv_heads=8, dtype=BF16))
        call.run(vllm_ops, 1, mirror, "cpu")
        results.append(call.out)
    torch.set_num_threads(before)
    assert torch.equal(*results)


@pytest.mark.gpu
def test_a_captured_call_takes_other_lengths():
    case = decode_case((40, 300, 1000), dtype=BF16, head_size=128, num_heads=32, num_kv_heads=8)
    call = make_call(case)
    lengths = call.seq_lens.cuda()
    tensors = [x.cuda() for x in (call.query, call.key_cache, call.value_cache, call.tables)]
    out = torch.empty_like(tensors[0])

    def attend():
        vllm_ops.paged_attention_v1(
            out, *tensors[:3], 8, 128**-0.5, tensors[3], lengths, 16, 1040, None, "auto", 1.0, 1.0
        )

    attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend()
    lengths.copy_(lengths // 2)
    graph.replay()
    again = out.clone()
    attend()
    assert torch.equal(again, out)


def test_signatures_are_vllms():
    v1 = list(inspect.signature(vllm_ops.paged_attention_v1).parameters.values())
    v2 = list(inspect.signature(vllm_ops.paged_attention_v2).parameters.values())
    names = (
        "out query key_cache value_cache num_kv_heads scale block_tables seq_lens block_size "
        "max_seq_len alibi_slopes kv_cache_dtype k_scale v_scale tp_rank blocksparse_local_blocks "
        "blocksparse_vert_stride blocksparse_block_size blocksparse_head_sliding_step"
    )
    assert " ".join(p.name for p in v1) == names
    assert [p.name for p in v2] == [
        "out", "exp_sum", "max_logits", "tmp_out", *(p.name for p in v1[1:])
    ]  # fmt: skip
    for parameters in (v1, v2):
        assert [p.default for p in parameters[-5:]] == [0, 0, 0, 64, 0]
