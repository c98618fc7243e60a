"""Plans of the window kernels on Hopper, and the small kernels before and after them."""

import itertools
from dataclasses import replace

import pytest
import torch

from pagetile.device import DeviceInfo
from pagetile.ops.window_attention import Problem
from pagetile.ops.window_attention.hopper.constants import ONE_HOT_COLUMNS, PIECE, REGION_WORDS
from pagetile.ops.window_attention.hopper.plan import (
    make_columns_plan,
    make_one_tile_plan,
    make_plan,
    make_rows_plan,
    padded_head_size,
)

F16 = torch.float16
H200 = DeviceInfo("cuda", 132, "H200", capability=(9, 0))
SHARED_MEMORY = 232_448
VOLUME = Problem(343, 6, 343, 16, F16, table_size=2197, num_masks=343, has_regions=True)
TOKENS = (65, 81, 100, 128, 144, 169, 193, 196, 216, 224, 256, 257, 343, 384, 392, 512, 576, 1000)
SIZES = list(itertools.product((*TOKENS, 1024), (8, 16, 24, 32, 48, 64), (True, False)))


def plans(maker):
    for num_tokens, head_size, has_regions in SIZES:
        problem = replace(
            VOLUME, num_tokens=num_tokens, head_size=head_size, has_regions=has_regions
        )
        plan = maker(problem, H200)
        if plan is not None:
            yield problem, plan


@pytest.mark.parametrize("maker", [make_plan, make_columns_plan])
def test_pieces_cover_the_tokens_and_fit_into_shared_memory(maker):
    found = list(plans(maker))
    assert len(found) > len(SIZES) // 2
    for problem, plan in found:
        columns = plan.full_pieces * plan.piece + plan.last_piece
        assert problem.num_tokens <= columns < problem.num_tokens + PIECE
        width = padded_head_size(problem.head_size)
        one_hot = ONE_HOT_COLUMNS if problem.has_regions else 0
        is_columns = maker is make_columns_plan
        rows = plan.streams * plan.q_stages * plan.rows * 2 * (width * (1 + is_columns) + one_hot)
        pieces = (
            plan.streams * plan.stages * plan.piece * (2 * (2 * width + one_hot) + 8 * is_columns)
        )
        retry = 0 if is_columns else 4 * plan.streams * plan.rows
        assert 2 * plan.rows * columns + rows + pieces + retry + 2048 <= SHARED_MEMORY
        registers = plan.streams * plan.warps * 32 * plan.registers + 128 * 24
        assert registers <= 1 << 16
        assert plan.stages >= 2


@pytest.mark.interpret
@pytest.mark.parametrize("head_size", [1, 18, 30, 45, 63])
def test_rows_of_any_size_are_copied_to_where_they_can_be_read(head_size):
    """The elements between rows are not copied."""
    pytest.importorskip("triton", reason="Triton is not installed: nothing to interpret")
    from pagetile.ops.window_attention.hopper.launch import align_tokens
    from pagetile.tiles.hopper.gluon_launcher import is_described

    numbers = torch.randn(3, 5, 49, head_size).half()
    spread = torch.full((3, 49, 2, 5, 71), torch.nan, dtype=F16)
    tokens = spread[:, :, 1, :, :head_size].transpose(1, 2)
    tokens.copy_(numbers)
    same = numbers[:1, :, :1].expand_as(numbers)  # of one token in every window
    for given, expected in ((tokens, numbers), (numbers, numbers), (same, same)):
        found = align_tokens(given)
        assert torch.equal(found, expected)
        assert is_described(found)
        room = found.stride(2) - head_size
        assert 0 <= room < 8
        behind = found.as_strided((*found.shape[:3], room), found.stride(), head_size)
        assert not behind.any()


def test_key_splits_cover_the_keys_and_fit_into_shared_memory():
    found = list(plans(make_rows_plan))
    assert found
    for problem, plan in found:
        width = padded_head_size(problem.head_size)
        one_hot = ONE_HOT_COLUMNS if problem.has_regions else 0
        together = plan.splits * plan.keys
        assert (plan.launches - 1) * together < problem.num_tokens <= plan.launches * together
        assert plan.launches * together <= (2 if width > 32 else 1.5) * problem.num_tokens
        assert plan.keys % plan.box == 0
        assert plan.box % 32 == 0
        numbers = 2 * (2 * width + one_hot)
        memory = (
            2 * PIECE * plan.splits * plan.keys + plan.stages * plan.splits * plan.keys * numbers
        )
        memory += 2 * PIECE * (numbers + 8) + plan.buffers * plan.splits * PIECE * width * 4
        assert memory + 512 <= SHARED_MEMORY
        assert plan.splits * 128 * plan.registers + 128 * 24 <= 1 << 16


@pytest.mark.parametrize(
    ("num_tokens", "cut"),
    [
        (96, (1, 3, 32)),
        (128, (1, 4, 32)),
        (144, (1, 3, 64)),
        (256, (1, 4, 64)),
        (288, (1, 3, 96)),
        (343, (1, 3, 128)),
        (392, (2, 4, 64)),
        (512, (2, 4, 64)),
        (576, (2, 3, 96)),
        (768, (2, 3, 128)),
        (784, (3, 3, 96)),
        (1024, (3, 3, 128)),
    ],
)
def test_the_row_kernel_takes_few_launches_of_few_keys(num_tokens, cut):
    plan = make_rows_plan(replace(VOLUME, num_tokens=num_tokens, head_size=32), H200)
    assert (plan.launches, plan.splits, plan.keys) == cut


def test_where_the_column_kernel_fits_the_row_kernel_fits():
    for problem, _ in plans(make_columns_plan):
        assert make_rows_plan(problem, H200) is not None


def test_heads_that_do_not_fit_into_shared_memory_have_no_plan():
    assert make_plan(replace(VOLUME, num_tokens=1024, head_size=64), H200) is None
    assert make_columns_plan(replace(VOLUME, num_tokens=784, head_size=64), H200) is None


@pytest.mark.parametrize("maker", [make_plan, make_columns_plan, make_rows_plan])
@pytest.mark.parametrize("num_heads", [1, 3, 6, 12, 67])
def test_programs_have_windows_and_multiprocessors_have_programs(maker, num_heads):
    for num_windows in (1, 2, 8, 64, 343, 2744):
        problem = replace(VOLUME, num_heads=num_heads, num_windows=num_windows)
        plan = maker(problem, H200)
        assert 1 <= plan.chunks <= num_windows
        rows = PIECE if maker is make_rows_plan else plan.rows
        programs = -(-problem.num_tokens // rows) * num_heads * plan.chunks
        if num_windows >= 343:
            busy = programs / (-(-programs // 132) * 132)
            assert busy > 0.75


@pytest.mark.parametrize("is_backward", [False, True])
@pytest.mark.parametrize("num_heads", [1, 3, 12, 67, 2000])
def test_programs_share_one_tile_windows_evenly(is_backward, num_heads):
    for num_windows, head_size in itertools.product((1, 64, 343, 4096), (8, 32, 64)):
        problem = replace(
            VOLUME, num_heads=num_heads, num_windows=num_windows, num_tokens=49, head_size=head_size
        )
        plan = make_one_tile_plan(problem, H200, is_backward)
        assert 1 <= plan.chunks <= num_windows
        assert plan.chunks * num_heads <= max(plan.programs * 132, num_heads)
        rounds, slots = -(-num_windows // plan.chunks), max(num_heads, plan.programs * 132)
        if num_windows * num_heads >= 4 * slots:
            assert num_windows * num_heads > 0.7 * rounds * slots
        assert plan.programs * plan.registers * 128 <= 1 << 16


# --- small kernels ------------------------------------------------------------------------------


def device():
    return "cpu" if not torch.cuda.is_available() else "cuda"


@pytest.mark.interpret
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64], ids=str)
def test_the_product_of_one_hot_columns_is_the_mask(dtype):
    from pagetile.ops.window_attention.hopper.auxiliary import encode_regions

    random = torch.Generator().manual_seed(1)
    counts, num_tokens, factor = [1, 2, 3, 7, 8, 9, 20], 50, 565.685
    regions = torch.stack(
        [torch.randperm(num_tokens, generator=random) % count * 3 + 5 for count in counts]
    )
    regions = (regions - (20 if dtype != torch.uint8 else 0)).to(dtype).to(device())
    classes = torch.full([len(counts)], -1, dtype=torch.int32, device=device())
    shape = [len(counts), num_tokens, 2 * ONE_HOT_COLUMNS]
    one_hot = torch.full(shape, torch.nan, device=device()).half()
    factor = torch.tensor(factor).half().item()
    encode_regions[(len(counts),)](
        classes, one_hot, regions, factor, 8, NUM_TOKENS=num_tokens, TILE=64
    )
    assert classes.tolist() == [0, 1, 1, 1, 1, 2, 2]
    for window in range(1, 5):
        columns, rows = one_hot[window].double().split(ONE_HOT_COLUMNS, dim=1)
        same = regions[window][:, None] == regions[window][None, :]
        assert torch.equal(rows @ columns.mT, (same.double() - 1) * factor)


@pytest.mark.interpret
@pytest.mark.parametrize("num_tokens", [33, 50, 64])
def test_packed_bits_are_the_pairs_of_one_region(num_tokens):
    from pagetile.ops.window_attention.hopper.auxiliary import pack_regions

    random = torch.Generator().manual_seed(4)
    counts = [1, 2, 9, 64]
    regions = torch.stack(
        [torch.randperm(num_tokens, generator=random) % count - 5 for count in counts]
    )
    words = torch.full([len(counts), REGION_WORDS], 7, dtype=torch.int32, device=device())
    pack_regions[(len(counts),)](words, regions.to(device()), NUM_TOKENS=num_tokens)
    assert words[:, 2 * PIECE].tolist() == [0, 1, 1, 1]
    bits = words[:, : 2 * PIECE].view(-1, PIECE, 2, 1) >> torch.arange(32, device=device()) & 1
    assert bits[:, num_tokens:].all()  # padded queries are never masked
    same = regions[:, :, None] == regions[:, None, :]
    found = bits.flatten(2)[:, :num_tokens, :num_tokens].bool().cpu()
    assert torch.equal(found, same)


@pytest.mark.interpret
@pytest.mark.parametrize("dtype", [F16, torch.float32], ids=str)
@pytest.mark.parametrize("has_dlse", [True, False])
def test_deltas_and_pivots_match_float64(has_dlse, dtype):
    from pagetile.ops.window_attention.hopper.auxiliary import make_deltas

    random = torch.Generator().manual_seed(2)
    windows, heads, tokens, size, padded = 2, 3, 70, 12, 128
    out, dout = (
        torch.randn(windows, tokens, heads, size, generator=random).to(device(), dtype)
        for _ in range(2)
    )
    lse, dlse = (torch.randn(windows, heads, tokens, generator=random).to(device()) for _ in "ab")
    lse[1, 2, 3] = -torch.inf
    pivot, delta = torch.full((2, windows * heads, padded), torch.nan, device=device()).unbind(0)
    dout = dout.transpose(1, 2)
    grid = (windows * heads * 1,)
    make_deltas[grid](
        pivot, delta, out, dout, lse, dlse, *dout.stride()[:3], 1.5, NUM_HEADS=heads,
        NUM_TOKENS=tokens, PADDED=padded, HEAD_SIZE=size, HAS_DLSE=has_dlse, TILE=256, D=16,
    )  # fmt: skip
    if dtype == F16:  # -pivot as two float16 numbers a piece, and -delta
        high, low = pivot.view(F16).view(-1, padded // PIECE, 2, PIECE).float().unbind(2)
        pivot = -(high + low).flatten(1)
        delta = -delta.view(F16).view(-1, padded // PIECE, 2, PIECE)[:, :, 0].float().flatten(1)
        assert (low.abs() <= high.abs() / 2048).all()
    pivot, delta = (  # undo the order of threads within 32 rows
        x.view(-1, padded // 32, 4, 4, 2).transpose(2, 3).flatten(1) for x in (pivot, delta)
    )
    wanted = (out.transpose(1, 2).double() * dout.double()).sum(-1) - has_dlse * dlse
    found = delta.view(windows, heads, padded)[..., :tokens].double()
    assert torch.allclose(found, wanted, atol=1e-5, rtol=5e-4 if dtype == F16 else 1e-5)
    wanted = lse.masked_fill(lse == -torch.inf, 0.0) * 1.5
    assert torch.allclose(pivot.view(windows, heads, padded)[..., :tokens], wanted, atol=1e-6)
    for padding in (pivot[:, tokens:], delta[:, tokens:]):
        assert (padding == 0).all()


@pytest.mark.interpret
@pytest.mark.parametrize("is_table", [True, False], ids=["table", "dense"])
@pytest.mark.parametrize(("chunks", "most"), [(1, 1), (8, 8), (11, 4)])
def test_bias_sums_are_added_over_chunks_and_put_in_order(chunks, most, is_table):
    from pagetile.ops.window_attention.hopper.auxiliary import sum_tiles

    heads, tokens, rows, keys = 2, 77, 2, 5  # tiles of 64 rows and of 16 keys
    random = torch.Generator().manual_seed(3)
    whole = torch.randn(chunks, heads, 64 * rows, 16 * keys, generator=random).to(device())
    tiles = whole.view(chunks, heads, rows, 64, keys, 16).transpose(3, 4)
    held = tiles.reshape(-1, 4, 2, 8, 2, 4, 2)  # warp, 8 rows, row; 8 keys, pair, key
    sums = held.permute(0, 4, 1, 3, 5, 2, 6).reshape(chunks, -1).contiguous()
    dbias = torch.full((heads, tokens, tokens), torch.nan, device=device())
    offsets = (torch.randperm(90, generator=random)[:tokens] - 3).int().to(device())
    inverse = torch.full((101 * is_table,), -7, dtype=torch.int32, device=device())
    grid = (sums.shape[1] // 512 + -(-len(inverse) // 16),)
    sum_tiles[grid](
        dbias, inverse if is_table else sums.int(), sums, offsets, chunks, len(inverse) - 1,
        NUM_HEADS=heads, NUM_TOKENS=tokens, CHUNKS=most, TILE=512, WIDTH=128,
    )  # fmt: skip
    wanted = whole.double().sum(0)[:, :tokens, :tokens]
    assert torch.allclose(dbias.double(), wanted, atol=1e-5)
    if is_table:
        smallest = offsets.min()
        assert inverse[-1] == smallest
        i = torch.arange(tokens, dtype=torch.int32, device=device())
        assert torch.equal(inverse[(offsets - smallest).long()], i)
        assert (inverse[:-1] >= 0).sum() == tokens
