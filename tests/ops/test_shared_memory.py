"""What is written shares no memory with what is read, and has no element twice."""

from dataclasses import replace

import pytest
import torch

from pagetile import PagedBatch, ShapeError, copy_blocks, paged_attention, write_kv

SLOTS = torch.tensor([5, 40])


@pytest.fixture
def rows():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, 8, 64, generator=generator)


@pytest.fixture
def caches():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, 10, 16, 2, 64, generator=generator)


def attend(q, k_cache, v_cache, out, impl="auto"):
    batch = PagedBatch.of([[3, 8], [5]], [30, 7])
    return paged_attention(q, k_cache, v_cache, batch, out=out, impl=impl).out


@pytest.mark.parametrize("impl", ["cpu", "reference"])
@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("q", lambda q, kv: q),
        ("q", lambda q, kv: q.as_strided((2, 8, 64), (512, 64, 1), 512)),
        ("k_cache", lambda q, kv: kv[0, 3].view(-1)[:1024].view(2, 8, 64)),
        ("v_cache", lambda q, kv: kv[1].view(-1)[-1024:].view(2, 8, 64)),
    ],
)
def test_an_output_that_is_part_of_an_input_is_refused(rows, caches, name, where, impl):
    big = torch.zeros(4096)
    q = big[:1024].view(2, 8, 64).copy_(rows)
    before = q.clone(), caches.clone()
    for _ in range(3):  # also where a cached call matches
        attend(q, *caches, torch.empty_like(q), impl)
        with pytest.raises(ShapeError, match=f"out is written.* {name}"):
            attend(q, *caches, where(q, caches), impl)
    assert torch.equal(q, before[0])
    assert torch.equal(caches, before[1])


@pytest.mark.parametrize("impl", ["cpu", "reference"])
@pytest.mark.parametrize(
    ("name", "dtype", "shape"),
    [
        ("alibi_slopes", torch.float32, (8,)),
        ("sinks", torch.float32, (8,)),
        ("k_scale", torch.float32, (10, 16, 2)),
        ("v_scale", torch.float32, (2,)),
        ("visible_blocks", torch.int32, (2, 2, 1)),
        ("block_tables", torch.int32, (2, 2)),
        ("seq_lens", torch.int32, (2,)),
        ("cu_seqlens_q", torch.int32, (3,)),
    ],
)
def test_an_output_that_is_part_of_any_other_input_is_refused(
    rows, caches, name, dtype, shape, impl
):
    batch = PagedBatch.of([[3, 8], [5]], [30, 7])
    options = {}
    if name.endswith("scale"):
        caches = caches.to(torch.int8)
        options = {other: torch.ones(shape) for other in ("k_scale", "v_scale")}
    size = torch.Size(shape).numel()
    memory = torch.zeros(1023 + size)
    mine = memory.view(dtype)[1023:].view(shape)
    if hasattr(batch, name):
        batch = replace(batch, **{name: mine.copy_(getattr(batch, name))})
    else:
        options[name] = mine
    before = memory.clone()
    with pytest.raises(ShapeError, match=f"out is written.* {name}"):
        paged_attention(
            rows, *caches, batch, **options, out=memory[:1024].view(2, 8, 64), impl=impl
        )
    assert torch.equal(memory.view(torch.int32), before.view(torch.int32))  # -1 is a NaN
    paged_attention(rows, *caches, batch, **options, out=torch.empty_like(rows), impl=impl)


def test_an_output_between_the_rows_of_q_is_fine(rows, caches):
    both = torch.stack([rows, rows], 1)
    q, out = both.unbind(1)
    expected = attend(rows, *caches, torch.empty_like(rows))
    assert torch.equal(attend(q, *caches, out), expected)
    assert torch.equal(q, rows)


@pytest.mark.parametrize("dim", [0, 1])
def test_an_output_with_an_element_twice_is_refused(rows, caches, dim):
    out = torch.zeros_like(rows).narrow(dim, 0, 1).expand_as(rows)
    with pytest.raises(ShapeError, match=r"out is written.*strides"):
        attend(rows, *caches, out)
    assert not out.any()


@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_caches_that_overlap_are_refused(rows, impl):
    memory = torch.zeros(11, 16, 2, 64)
    k, v = rows[:, :2], rows[:, 2:4]
    new = memory[3, :2]  # in the cache that is written
    for arguments, message in [
        ((k, v, memory[:10], memory[1:]), "k_cache is written.* v_cache"),
        ((new, v, memory[:5], memory[5:10]), "k_cache is written.* k:"),
        ((k, new, memory[:5], memory[5:10]), "k_cache is written.* v:"),
        ((k, new, memory[5:10], memory[:5]), "v_cache is written.* v:"),
        ((k, v, memory[:1].expand(10, -1, -1, -1), memory[1:]), "k_cache is written.*strides"),
    ]:
        with pytest.raises(ShapeError, match=message):
            write_kv(*arguments, SLOTS, impl=impl)
    assert not memory.any()


def test_caches_that_take_turns_in_memory_are_written(rows):
    k_cache, v_cache = torch.zeros(10, 2, 16, 2, 64).unbind(1)
    write_kv(rows[:, :2], rows[:, 2:4], k_cache, v_cache, SLOTS)
    assert torch.equal(k_cache[[0, 2], [5, 8]], rows[:, :2])
    assert torch.equal(v_cache[[0, 2], [5, 8]], rows[:, 2:4])


def test_values_may_be_the_first_columns_of_the_keys(rows):
    cache = torch.zeros(10, 16, 2, 64)
    write_kv(rows[:, :2], rows[:, :2, :32], cache, cache[..., :32], SLOTS)
    assert torch.equal(cache[[0, 2], [5, 8]], rows[:, :2])


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        (lambda memory: (memory[:10], memory[:10]), "k_scale is written.* v_scale"),
        (lambda memory: (memory[1:], memory[:10]), "k_scale is written.* v_scale"),
        (lambda memory: (memory[:1].expand(10, 16, 2), memory[1:]), "k_scale is written.*strides"),
    ],
)
def test_scales_of_tokens_that_share_memory_are_refused(rows, scales, message):
    k_cache, v_cache = torch.zeros(2, 10, 16, 2, 64, dtype=torch.int8).unbind(0)
    k_scale, v_scale = scales(torch.zeros(11, 16, 2))
    with pytest.raises(ShapeError, match=message):
        write_kv(
            rows[:, :2], rows[:, 2:4], k_cache, v_cache, SLOTS, k_scale=k_scale, v_scale=v_scale
        )
    assert not k_cache.any()


def test_scales_of_tokens_may_take_turns_in_memory(rows):
    k_cache, v_cache = torch.zeros(2, 10, 16, 2, 64, dtype=torch.int8).unbind(0)
    k_scale, v_scale = torch.zeros(10, 2, 16, 2).unbind(1)
    write_kv(rows[:, :2], rows[:, 2:4], k_cache, v_cache, SLOTS, k_scale=k_scale, v_scale=v_scale)
    for scale, new in ((k_scale, rows[:, :2]), (v_scale, rows[:, 2:4])):
        assert torch.equal(scale[[0, 2], [5, 8]], new.abs().amax(-1) / 127)


def test_values_that_are_columns_of_8_bit_keys_cannot_have_scales_of_their_own(rows):
    """The scale of a token's values is not that of its keys."""
    cache, (k_scale, v_scale) = (
        torch.zeros(10, 16, 2, 64, dtype=torch.int8),
        torch.ones(2, 10, 16, 2),
    )
    new = rows[:, :2], rows[:, :2, :32], cache, cache[..., :32], SLOTS
    with pytest.raises(ShapeError, match=r"k_cache is written.* v_cache"):
        write_kv(*new, k_scale=k_scale, v_scale=v_scale)
    assert not cache.any()
    write_kv(*new, k_scale=k_scale[0, 0], v_scale=k_scale[0, 0])
    assert torch.equal(cache[[0, 2], [5, 8]], rows[:, :2].round().to(torch.int8))


@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_entries_of_copied_caches_that_overlap_are_refused(impl):
    memory = torch.arange(12.0).repeat_interleave(4).view(12, 4)
    before = memory.clone()
    for caches in (
        [memory[:8], memory[4:]],
        [memory[4:], memory[8:], memory[:6]],
        [(memory[:8], torch.zeros(8, 4)), memory[6:]],
    ):
        with pytest.raises(ShapeError, match="in whole or in part"):
            copy_blocks(caches, [(0, 1)], impl=impl)
    with pytest.raises(ShapeError, match=r"destination is written.*strides"):
        copy_blocks([(memory, torch.zeros(1, 4).expand(12, 4))], [(0, 1)], impl=impl)
    assert torch.equal(memory, before)


@pytest.mark.parametrize("impl", ["cpu", "reference"])
def test_copied_caches_may_take_turns_in_memory(impl):
    both = torch.arange(24.0).view(6, 2, 2)
    copy_blocks(list(both.unbind(1)), [(0, 1)], impl=impl)
    assert torch.equal(both[1], both[0])
