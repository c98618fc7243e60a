"""The paged attention kernels compile for Hopper, without a GPU.

Few registers are left free by design: a spilled one fails here. Every run compiles one kernel for
each property that is checked, and ``pytest -m slow`` every shipped configuration.
"""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: nothing to compile")

from test_compiled import assert_fits, check_registers, rarely
from triton.backends.compiler import GPUTarget

from pagetile import BlockPool, KVCache, LayerSpec
from pagetile.device import DeviceInfo
from pagetile.errors import ShapeError
from pagetile.ops.paged_attention import PagedBatch, Problem, triton
from pagetile.ops.paged_attention.checks import validate
from pagetile.ops.paged_attention.hopper import SPECIALISED
from pagetile.ops.paged_attention.plan import make_gpu_plan
from pagetile.ops.paged_attention.plan.prefixes import make_prefix_plan
from pagetile.ops.paged_attention.problem import Arguments, form_of
from pagetile.ops.paged_attention.triton import DECODE, PREFILL
from pagetile.shapes import Form

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
SMALL = DeviceInfo("cuda", 128, "RTX", capability=(8, 9), shared_memory=99 << 10)
H200 = DeviceInfo("cuda", 132, "NVIDIA H200", capability=(9, 0))


def problem(group, size, kv_dtype=BF16, scales="none", query_len=1, block_size=16, dtype=BF16):
    return Problem(
        64, 64 * query_len, query_len, 4096, 8 * group, 8, size, size, block_size, dtype, kv_dtype,
        scales,
    )  # fmt: skip


def call_form(question, *, features):
    """Return the form of a call that poses the problem."""

    def empty(*shape, dtype=F32):
        return torch.empty(shape, dtype=dtype, device="meta")

    cache = empty(
        2048, question.block_size, question.num_kv_heads, question.head_size,
        dtype=question.kv_dtype,
    )  # fmt: skip
    scales = {"none": None, "head": cache[0, 0, :, 0].float(), "token": cache[..., 0].float()}
    heads, scale = question.num_heads, scales[question.scale_kind]
    batch = PagedBatch(
        empty(question.num_seqs, 256, dtype=torch.int32),
        empty(question.num_seqs, dtype=torch.int32),
        empty(question.num_seqs + 1, dtype=torch.int32),
        question.max_query_len,
        question.max_seq_len,
    )
    given = {"logits_soft_cap": 30.0, "alibi_slopes": empty(heads), "sinks": empty(heads)}
    given = given if features else {}
    q = empty(question.num_tokens, heads, question.head_size, dtype=question.q_dtype)
    call = Arguments(q, cache, cache, batch, 0.1, k_scale=scale, v_scale=scale, **given)
    form = form_of(call)
    assert replace(validate(form), logits_soft_cap=None) == question
    return form


def make_launcher(
    kernel, question, *, device=H200, features=False, batch_invariant=False, **changes
):
    """Return the launcher of a call; ``changes`` apply to its form."""
    plan = make_gpu_plan(
        question, device, hopper=kernel is SPECIALISED, batch_invariant=batch_invariant
    )
    form = call_form(question, features=features)._replace(**changes)
    return triton.prepare(question, form, plan, kernel).launch.launcher


@pytest.mark.parametrize(
    ("group", "size", "kv_dtype", "scales", "features"),
    [
        (4, 128, BF16, "none", False),
        (8, 256, BF16, "none", True),
        (4, 128, E4M3, "head", False),
        *rarely(
            (4, 128, INT8, "token", True),
            (2, 64, BF16, "none", True),
            (4, 128, E4M3, "token", True),
            (4, 128, E5M2, "head", True),
            (2, 64, BF16, "none", False),
            (4, 128, BF16, "none", True),
            (8, 256, BF16, "none", False),
            (4, 128, E4M3, "head", True),
            (4, 128, E4M3, "token", False),
            (4, 128, E5M2, "head", False),
            (4, 128, INT8, "token", False),
        ),
    ],
    ids=str,
)
def test_decode_on_hopper(group, size, kv_dtype, scales, features, tmp_path):
    launcher = make_launcher(SPECIALISED, problem(group, size, kv_dtype, scales), features=features)
    ptx = assert_fits(launcher, tmp_path)
    assert "cp.async.cg.shared.global" in ptx
    assert "setmaxnreg" in ptx


@pytest.mark.parametrize(
    ("group", "size", "heads", "features"),
    [
        (4, 80, 4, True),
        *rarely(
            (4, 80, 4, False),
            (8, 240, 2, True),
            (8, 80, 2, True),
            (4, 48, 4, True),
            (7, 48, 2, True),
            (1, 32, 2, False),
            (4, 16, 4, True),
            (4, 96, 2, False),
            (1, 144, 2, True),
            (7, 240, 2, False),
        ),
    ],
    ids=str,
)
def test_decode_of_joined_heads_on_hopper(group, size, heads, features, tmp_path):
    """As many CTAs fit a multiprocessor as planned, and a tile has products for each head."""
    question = problem(group, size)
    plan = make_gpu_plan(question, H200, hopper=True)
    assert plan.tile_heads == heads
    launcher = make_launcher(SPECIALISED, question, features=features)
    assert launcher.constants["GROUP"] == heads * group
    ptx = assert_fits(launcher, tmp_path)
    assert "cp.async.cg.shared.global" in ptx
    compiled = launcher.compile(GPUTarget("cuda", 90, 32))
    ctas = -(-plan.num_programs // H200.num_workers)
    assert ctas * (compiled.metadata.shared + 1024) <= 228 << 10
    assert ctas * 8 * 32 * plan.max_registers <= 65536


@pytest.mark.parametrize("heads", [8, 256, 512])
def test_offsets_within_32_bits_hold_every_head_and_slot(heads):
    """The largest queries and caches in which a head's tokens are adjacent."""
    question = replace(problem(1, 64, block_size=256), num_heads=heads, num_kv_heads=heads)
    for stride in ((1 << 22) - 8, (1 << 23) - 8, 1 << 23):
        form = call_form(question, features=False)
        far = form.q._replace(strides=(64, stride, 1))
        types = make_launcher(SPECIALISED, question, q=far).types
        kind = types["q_head"].partition(":")[0]
        assert kind == types["q_token"].partition(":")[0]
        assert kind == ("i32" if max(256, heads) * stride < 1 << 30 else "i64")


def test_a_plan_of_joined_heads_is_refused_where_they_cannot_be():
    question = problem(4, 80)
    single = replace(question, num_heads=4, num_kv_heads=1)
    plan = make_gpu_plan(question, H200, hopper=True)
    for other, kernel in ((question, DECODE), (single, SPECIALISED)):
        with pytest.raises(ShapeError, match="tile_heads=4"):
            triton.prepare(other, call_form(other, features=False), plan, kernel)


@pytest.mark.parametrize(
    ("size", "kv_dtype", "scales", "spilled", "features"),
    [
        (192, INT8, "token", 80, True),
        *rarely(
            (256, E4M3, "head", 0, False),
            (192, INT8, "token", 80, False),
            (256, E4M3, "token", 64, False),
            (256, E4M3, "token", 64, True),
            (256, E4M3, "head", 0, True),
        ),
    ],
    ids=str,
)
def test_decode_of_wide_heads_of_eight_bits_on_hopper(
    size, kv_dtype, scales, spilled, features, tmp_path
):
    question = problem(2, size, kv_dtype, scales)
    assert_fits(make_launcher(SPECIALISED, question, features=features), tmp_path, spilled)


@pytest.mark.parametrize(
    ("size", "group", "features", "batch_invariant"),
    [
        (128, 6, False, False),
        (64, 4, True, True),
        *rarely((128, 8, True, False), (64, 8, False, False), (128, 4, True, True)),
    ],
    ids=str,
)
def test_decode_of_many_rows_on_hopper(size, group, features, batch_invariant, tmp_path):
    """Two CTAs fit a multiprocessor, and read keys and values in shared memory."""
    question = problem(group, size, query_len=6)
    plan = make_gpu_plan(question, H200, hopper=True, batch_invariant=batch_invariant)
    form = call_form(question, features=features)
    call = triton.prepare(question, form, plan, SPECIALISED)
    ptx = assert_fits(call.launch.launcher, tmp_path)
    assert "wgmma.mma_async" in ptx
    assert "mma.sync" not in ptx
    compiled = call.launch.launcher.compile(GPUTarget("cuda", 90, 32))
    check_registers(compiled, tmp_path)
    assert 2 * (compiled.metadata.shared + 1024) <= 228 << 10
    assert 2 * 8 * 32 * plan.max_registers <= 65536
    assert_fits(call.merge.launcher, tmp_path)


def test_decode_beside_a_prefill_waits_at_its_end(tmp_path):
    question = problem(4, 128)
    form = call_form(question, features=False)
    plan = make_gpu_plan(question, H200, hopper=True)
    call = triton.prepare(question, form, plan, SPECIALISED, overlaps_prefill=True)
    assert count_waits(call.launch.launcher, tmp_path) == (1, 0)


def test_equal_strides_of_keys_and_values_are_multiplied_once(tmp_path):
    """With 14 rows of a head the loading warps had spilled values' places, in every tile."""
    question = problem(4, 128)
    values = call_form(question, features=False).v_cache
    apart = values._replace(strides=(2 * values.strides[0], *values.strides[1:]))
    together, each = (
        assert_fits(make_launcher(SPECIALISED, question, **changes), tmp_path).count("mul.wide.s32")
        for changes in ({}, {"v_cache": apart})
    )
    assert each - together == 8, "rows of a tile that a thread copies"


@pytest.mark.parametrize("capability", [(8, 0), (8, 9)], ids=str)
def test_e4m3_is_refused_where_triton_does_not_compile_it(capability):
    device = DeviceInfo("cuda", 108, "a GPU", capability=capability)
    reason = triton.supports(problem(4, 128, E4M3, "head"), device)
    assert (reason is None) == (capability >= (8, 9))
    assert triton.supports(problem(4, 128, E5M2, "head"), device) is None


def count_waits(launcher, tmp_path):
    """How many places wait for the preceding kernel, and how many of them before any load.

    One address of a head may be spilled, before its tiles.
    """
    ptx = assert_fits(launcher, tmp_path, 8)
    before_loads = ptx[: ptx.index("ld.global")].count("griddepcontrol.wait")
    return ptx.count("griddepcontrol.wait"), before_loads


@pytest.mark.parametrize(
    ("size", "kv_dtype"), [(64, BF16), *rarely((128, BF16), (256, E4M3))], ids=str
)
def test_lengths_are_read_before_the_wait_where_the_batch_allows_it(size, kv_dtype, tmp_path):
    question = problem(2, size, kv_dtype, "none" if kv_dtype == BF16 else "head")
    assert count_waits(make_launcher(SPECIALISED, question), tmp_path) == (1, 1)
    launcher = make_launcher(SPECIALISED, question, allows_early_reads=True)
    assert count_waits(launcher, tmp_path) == (2, 0)  # the loading and the computing warps


def test_single_scales_of_tokens_are_read_behind_the_wait(tmp_path):
    """They are copied through L1, which may hold old ones."""
    question = problem(2, 128, E4M3, "token")
    launcher = make_launcher(SPECIALISED, question, allows_early_reads=True)
    assert count_waits(launcher, tmp_path) == (1, 1)


@pytest.mark.parametrize("block_size", [16, *rarely((12,))])
def test_scales_of_a_cache_are_copied_four_at_a_time(block_size, tmp_path):
    question = problem(2, 128, E4M3, "token", block_size=block_size)
    form = call_form(question, features=False)
    cache = KVCache(
        [LayerSpec(8, 128, 128)], BlockPool(2048, block_size), device="meta", dtype=E4M3
    )
    scale = form.k_scale._replace(strides=cache.k_scale[0].stride())
    assert scale.shape == cache.k_scale[0].shape
    changes = {"k_scale": scale, "v_scale": scale, "has_aligned_scales": True}
    launcher = make_launcher(SPECIALISED, question, allows_early_reads=True, **changes)
    ptx = assert_fits(launcher, tmp_path)
    assert "cp.async.ca" not in ptx
    assert count_waits(launcher, tmp_path) == (2, 0)
    unaligned = changes | {"has_aligned_scales": False}
    assert "cp.async.ca" in assert_fits(make_launcher(SPECIALISED, question, **unaligned), tmp_path)


@pytest.mark.slow
def test_decode_on_hopper_with_fixed_splits(tmp_path):
    assert_fits(make_launcher(SPECIALISED, problem(4, 128), batch_invariant=True), tmp_path)


@pytest.mark.parametrize("size", [32, 64, 128, 256])
@pytest.mark.parametrize("group", [1, 2, 7, 16])
def test_a_merge_loads_as_many_bytes_of_few_rows_as_of_many(group, size):
    few = replace(problem(group, size), num_seqs=1, num_tokens=1, num_heads=group, num_kv_heads=1)
    constants = make_launcher(SPECIALISED, few).constants
    loaded = constants["LANES"] * max(1, constants["AT_ONCE"] // 2)
    assert loaded * constants["ROWS"] * constants["V"] * 4 == 16 << 10
    # One CTA merges no more than eight times as many, but 32; or, of all CTAs, their groups.
    assert constants["MOST_MERGED"] in (32, 8 * loaded)
    splits = 2 * H200.num_workers
    if splits > constants["MOST_MERGED"]:
        assert -(-splits // constants["MERGE_GROUP"]) <= constants["MOST_MERGED"]
    # With many heads a head has few splits, and rows of threads would only exchange states.
    assert make_launcher(SPECIALISED, problem(group, size)).constants["LANES"] == 1


@pytest.mark.parametrize(("kv_dtype", "scales"), [(BF16, "none"), *rarely((E4M3, "head"))], ids=str)
def test_decode_on_hopper_copies_pages_however_queries_lie(kv_dtype, scales, tmp_path):
    question = problem(4, 128, kv_dtype, scales)
    q = call_form(question, features=False).q._replace(strides=(1025, 129, 1))
    launcher = make_launcher(SPECIALISED, question, q=q, out=q, is_aligned=False)
    assert "cp.async.cg.shared.global" in assert_fits(launcher, tmp_path)


@pytest.mark.parametrize(
    ("group", "size", "kv_dtype", "scales", "query_len", "block_size", "features"),
    [
        (1, 64, BF16, "none", 1, 1, False),
        (4, 128, E4M3, "token", 1, 16, True),
        *rarely(
            (4, 128, BF16, "none", 1, 100, True),
            (4, 128, BF16, "none", 16, 16, True),
            (4, 128, BF16, "none", 1, 16, False),
            (4, 128, BF16, "none", 1, 16, True),
            (4, 128, BF16, "none", 1, 100, False),
            (4, 128, BF16, "none", 16, 16, False),
            (1, 64, BF16, "none", 1, 1, True),
            (4, 128, E4M3, "token", 1, 16, False),
        ),
    ],
    ids=str,
)
def test_decode_by_triton(group, size, kv_dtype, scales, query_len, block_size, features, tmp_path):
    question = problem(group, size, kv_dtype, scales, query_len, block_size)
    ptx = assert_fits(make_launcher(DECODE, question, features=features), tmp_path)
    assert "cp.async" in ptx


@pytest.mark.parametrize(
    ("size", "kv_dtype", "scales", "features"),
    [
        (128, E4M3, "token", False),
        *rarely(
            (256, BF16, "none", True),
            (64, BF16, "none", True),
            (128, BF16, "none", False),
            (64, BF16, "none", False),
            (128, BF16, "none", True),
            (256, BF16, "none", False),
            (128, E4M3, "token", True),
        ),
    ],
    ids=str,
)
def test_prefill_by_triton(size, kv_dtype, scales, features, tmp_path):
    question = problem(4, size, kv_dtype, scales, query_len=512)
    launcher = make_launcher(DECODE, question, features=features)
    assert launcher.kernel is PREFILL.function
    assert_fits(launcher, tmp_path)


OTHERS = [
    # new tokens, head size, types, scales, most bytes that are spilled
    (16, 256, BF16, INT8, "token", 512),
    (512, 128, F32, F32, "none", 104),
    *rarely(
        (16, 128, F32, F32, "none", 392),
        (1, 512, BF16, BF16, "none", 0),
        (1, 128, F32, INT8, "token", 0),
        (16, 256, BF16, BF16, "none", 40),
        (512, 512, BF16, BF16, "none", 16),
        (16, 256, F32, F32, "none", 296),
        (16, 128, F32, INT8, "token", 400),
        (16, 128, F32, BF16, "none", 232),
        (1, 256, BF16, INT8, "token", 0),
        (512, 512, F32, F32, "none", 0),
        (512, 256, BF16, E4M3, "token", 584),
    ),
]
"""Float32's operands are split in two, in registers: tiles that spill nothing were slower."""


@pytest.mark.parametrize(("query_len", "size", "dtype", "kv_dtype", "scales", "spilled"), OTHERS)
def test_other_forms_by_triton(query_len, size, dtype, kv_dtype, scales, spilled, tmp_path):
    question = problem(4, size, kv_dtype, scales, query_len, dtype=dtype)
    assert_fits(make_launcher(DECODE, question, features=True), tmp_path, spilled)


def test_a_batch_of_many_short_prefills_fits_in_a_grid():
    question = Problem(70_000, 70_000, 200, 200, 1, 1, 64, 64, 16, BF16, BF16)
    form = call_form(question, features=False)
    launch = triton.prepare(question, form, make_gpu_plan(question, H200))
    tiles, heads, _ = launch.launch.grid
    assert tiles > 65_535 >= heads  # of x, and of y


@pytest.mark.parametrize(
    ("size", "query_len", "dtype"),
    [
        (256, 512, BF16), (512, 1, F32),
        *rarely(
            (512, 16, BF16), (128, 512, F32),
            (512, 16, F32), (512, 512, BF16), (64, 16, F32), (128, 1, F32), (128, 16, F32),
            (256, 1, F32),
        ),
    ],
    ids=str,
)  # fmt: skip
def test_tiles_fit_into_the_memory_of_small_gpus(size, query_len, dtype):
    question = problem(4, size, dtype, query_len=query_len, dtype=dtype)
    compiled = make_launcher(DECODE, question, device=SMALL).compile(GPUTarget("cuda", 89, 32))
    assert compiled.metadata.shared <= SMALL.shared_memory


def test_fixed_splits_keep_no_more_states_than_block_tables_can_name():
    question = replace(problem(4, 128), max_seq_len=1 << 24)
    plan = make_gpu_plan(question, H200, batch_invariant=True)
    states, _, _ = triton.prepare(question, call_form(question, features=False), plan).scratch
    splits = 256 * 16 // plan.split_size + 1  # of the widest table that call_form makes
    assert states == question.num_seqs * question.num_kv_heads * splits * 4 * 128


@pytest.mark.parametrize(
    ("dtype", "width"),
    [
        (F16, 128),
        *rarely(
            (F32, 8),
            (BF16, 512),
            (F32, 128),
            (F32, 512),
            (F16, 8),
            (F16, 512),
            (BF16, 8),
            (BF16, 128),
        ),
    ],
    ids=str,
)
def test_merging_a_prefix(dtype, width, tmp_path):
    from pagetile.ops.paged_attention import triton_merge

    assert_fits(
        triton_merge.make_launcher(dtype, 32, width, 16, aligned=True, is_early=True), tmp_path
    )


@pytest.mark.parametrize(
    ("seqs", "group", "size", "kv_dtype", "scales", "dtype", "features"),
    [
        (8, 2, 128, BF16, "none", BF16, False),
        (64, 4, 64, INT8, "token", BF16, True),
        *rarely(
            (8, 2, 128, BF16, "none", BF16, True), (64, 2, 128, BF16, "none", BF16, False),
            (64, 2, 128, BF16, "none", BF16, True),
            (64, 4, 64, INT8, "token", BF16, False),
            *((*case, features) for features in (False, True) for case in [
                (16, 2, 128, BF16, "none", BF16), (64, 4, 128, E4M3, "head", BF16),
                (64, 8, 256, BF16, "none", BF16), (64, 4, 512, F16, "none", F16),
                (64, 4, 128, F32, "none", F32),
            ]),
        ),
    ],
    ids=str,
)  # fmt: skip
def test_a_shared_prefix(
    seqs, group, size, kv_dtype, scales, dtype, features, tmp_path, monkeypatch
):
    monkeypatch.setattr(triton, "begins_early", lambda _: True)
    question = replace(
        problem(group, size, kv_dtype, scales, dtype=dtype), num_seqs=seqs, num_tokens=seqs
    )
    ints = [Form(torch.Size((n,)), (1,), torch.int32, torch.device("meta")) for n in (9, 8)]
    form = call_form(question, features=features)._replace(shared_prefixes=(*ints, None, None))
    plan = make_prefix_plan(question, H200, seqs * group)
    launcher = triton.prepare_prefixes(question, form, plan, 4096, is_settled=True).launch.launcher
    is_rare = size >= 256 or dtype == F32  # the block ids of the next tile do not fit
    assert_fits(launcher, tmp_path, 256 if is_rare else 0)
    shared = launcher.compile(GPUTarget("cuda", 90, 32)).metadata.shared
    assert (shared + 1024) * (plan.num_programs // H200.num_workers) <= 228 << 10


@pytest.mark.parametrize(
    ("kv_dtype", "scales", "features"),
    [
        (BF16, "none", False),
        *rarely((BF16, "none", True), (E4M3, "token", False), (E4M3, "token", True)),
    ],
    ids=str,
)
def test_decode_of_listed_blocks_on_hopper(kv_dtype, scales, features, tmp_path):
    assert_fits(make_listed(SPECIALISED, features, kv_dtype=kv_dtype, scales=scales), tmp_path, 16)


@pytest.mark.parametrize(("query_len", "spilled"), [(512, 0), *rarely((1, 1024))])
def test_listed_blocks_by_triton(query_len, spilled, tmp_path):
    """Its decode spills: a block's address takes one more load."""
    assert_fits(make_listed(DECODE, features=False, query_len=query_len), tmp_path, spilled)


def make_listed(kernel, features, **sizes):
    """Return the launcher of a call that lists 32 blocks of each KV head."""
    question = problem(4, 128, **sizes)
    form = call_form(question, features=features)
    listed = Form(torch.Size((64, 8, 32)), (256, 32, 1), torch.int32, torch.device("meta"))
    question = replace(question, max_visible=32)
    plan = make_gpu_plan(question, H200, hopper=kernel is SPECIALISED)
    form = form._replace(visible_blocks=listed)
    return triton.prepare(question, form, plan, kernel).launch.launcher
