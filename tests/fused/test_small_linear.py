from functools import partial

import pytest
import torch

from pagetile.device import DeviceInfo
from pagetile.errors import ShapeError, UnsupportedError
from pagetile.fused.rms_norm import KINDS, Norm
from pagetile.fused.small_linear import (
    is_faster,
    is_faster_in_parts,
    is_faster_in_parts_on_hopper,
    is_faster_in_ring,
    is_faster_on_cpu,
    is_resident,
    partial_products,
    plan,
    small_linear,
)
from pagetile.fused.small_linear.problem import Problem

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
EPS = 1e-3


@pytest.fixture(params=["reference", pytest.param("triton", marks=pytest.mark.interpret)])
def impl(request):
    return request.param


def problem(num_rows, size, num_columns, dtype=F32, activation="", kind="", **has):
    """Random operands by name; those that are not asked for are left out."""
    generator = torch.Generator().manual_seed(size)
    rows = num_columns * (2 if activation else 1)

    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    found = {"x": 3 * draw(1, num_rows, size), "weight": draw(rows, size) / size**0.5}
    if has.get("bias"):
        found["bias"] = draw(rows)
    if has.get("residual"):
        found["residual"] = draw(1, num_rows, num_columns)
    if kind:
        found["norm"] = draw(size)
    return found


def run(tensors, activation, kind, impl, mirror):
    names = list(tensors)
    place = "triton" if impl.startswith("hopper") else impl
    with mirror(*tensors.values(), impl=place) as there:
        given = dict(zip(names, there, strict=True))
        norm = Norm(given.pop("norm"), EPS, kind) if kind else None
        x, weight = given.pop("x"), given.pop("weight")
        return small_linear(x, weight, norm=norm, activation=activation, **given, impl=impl).cpu()


def in_float64(tensors, activation, kind):
    """The product in float64, and by torch's separate operations in the operands' type."""
    found = []
    for wide in (True, False):
        t = {name: x.double() if wide else x for name, x in tensors.items()}
        norm = Norm(t.pop("norm"), EPS, kind) if kind else None
        x, weight = t.pop("x"), t.pop("weight")
        if norm is not None and wide:
            scale = norm.weight + (kind == "shifted")
            x, norm = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * scale, None
        options = {"norm": norm, "activation": activation, **t}
        found.append(small_linear(x, weight, **options, impl="reference").double())
    return found


def check(tensors, activation, kind, impl, mirror):
    """At most twice as far from float64 as the separate operations, plus rounding."""
    out = run(tensors, activation, kind, impl, mirror)
    true, own = in_float64(tensors, activation, kind)
    assert (out.dtype, out.shape) == (tensors["x"].dtype, true.shape)
    allowed = 2 * (own - true).norm() + 4 * torch.finfo(out.dtype).eps * true.norm()
    assert (out.double() - true).norm() <= allowed


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4])
@pytest.mark.parametrize(("size", "num_columns"), [(64, 24), (96, 5), (1032, 3)])
def test_few_rows(impl, size, num_columns, num_rows, dtype, mirror):
    check(problem(num_rows, size, num_columns, dtype), "", "", impl, mirror)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("num_rows", [5, 16, 17, 64])
@pytest.mark.parametrize(("size", "num_columns"), [(64, 24), (96, 5), (520, 40)])
def test_rows_of_tiles(impl, size, num_columns, num_rows, dtype, mirror):
    check(problem(num_rows, size, num_columns, dtype), "", "", impl, mirror)


@pytest.mark.parametrize("num_rows", [1, 3, 7])
@pytest.mark.parametrize("activation", ["", "silu", "gelu", "gelu_tanh", "relu"])
@pytest.mark.parametrize("has", [{"bias": True}, {"residual": True, "bias": True}], ids=str)
def test_bias_activation_and_residual_follow_the_product(impl, has, activation, num_rows, mirror):
    check(problem(num_rows, 64, 24, F16, activation, **has), activation, "", impl, mirror)


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("num_rows", "size"), [(1, 64), (3, 80), (2, 1032)])
def test_a_norm_before_the_product(impl, num_rows, size, kind, dtype, mirror):
    check(problem(num_rows, size, 20, dtype, "silu", kind), "silu", kind, impl, mirror)


@pytest.mark.interpret
def test_a_row_longer_than_a_tile_is_read_in_parts(mirror):
    for num_rows in (1, 4):
        tensors = problem(num_rows, 9216, 3, F32, "silu", "rounded", residual=True)
        assert (
            plan.make_plan(Problem(num_rows, 9216, 3, F32, is_gated=True, has_norm=True)).tile_k
            < 9216
        )
        check(tensors, "silu", "rounded", "triton", mirror)


@pytest.mark.interpret
@pytest.mark.parametrize("num_rows", [2, 6])
def test_rows_of_x_and_of_the_residual_may_lie_apart(num_rows, mirror):
    tensors = problem(num_rows, 64, 24, F16, residual=True)
    apart = {}
    for name in ("x", "residual"):
        wide = torch.full((1, num_rows, 2 * tensors[name].shape[-1]), torch.nan, dtype=F16)
        apart[name] = wide[..., : tensors[name].shape[-1]].copy_(tensors[name])
    out = run({**tensors, **apart}, "", "", "triton", mirror)
    assert torch.equal(out, run(tensors, "", "", "triton", mirror))


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 8, 16, 33, 64])
@pytest.mark.parametrize(
    ("size", "num_columns", "activation"),
    [(1024, 4096, ""), (2048, 1024, ""), (1024, 3072, "silu"), (3072, 1024, ""),
     (4096, 14336, "silu"), (14336, 4096, ""), (1024, 151936, "")],
)  # fmt: skip
def test_large_models_products(size, num_columns, activation, num_rows, mirror):
    tensors = problem(num_rows, size, num_columns, BF16, activation, residual=True)
    check(tensors, activation, "", "triton", mirror)
    again = [run(tensors, activation, "", "triton", mirror) for _ in range(2)]
    assert torch.equal(*again)


RESIDENT = [(1024, 4096, ""), (2048, 1024, ""), (1024, 3072, "silu"), (3072, 1024, ""),
            (1032, 40, "gelu"), (64, 24, "relu"), (520, 70, "")]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("kind", ["", *KINDS])
@pytest.mark.parametrize(("size", "num_columns", "activation"), RESIDENT)
def test_weights_held_in_registers(size, num_columns, activation, kind, dtype, mirror):
    is_hopper_or_skip()
    for num_rows, has in ((1, {}), (8, {"residual": True}), (11, {"bias": True}), (33, {})):
        tensors = problem(num_rows, size, num_columns, dtype, activation, kind, **has)
        check(tensors, activation, kind, "hopper", mirror)


@pytest.mark.gpu
@pytest.mark.parametrize(("size", "num_columns", "activation"), RESIDENT)
def test_a_row_does_not_depend_on_the_number_of_rows(size, num_columns, activation, mirror):
    is_hopper_or_skip()
    tensors = problem(16, size, num_columns, BF16, activation, "rounded", residual=True)
    expected = run(tensors, activation, "rounded", "hopper", mirror)
    for num_rows in range(1, 16):
        fewer = {
            name: x[:, :num_rows] if name in ("x", "residual") else x for name, x in tensors.items()
        }
        out = run(fewer, activation, "rounded", "hopper", mirror)
        assert torch.equal(out, expected[:, :num_rows])


def is_hopper_or_skip():
    if DeviceInfo.of(torch.device("cuda")).capability[0] != 9:
        pytest.skip("the kernel is for Hopper GPUs")


def test_hopper_names_the_reason_of_each_refusal():
    pytest.importorskip("triton.experimental.gluon")
    from pagetile.fused.small_linear import hopper as module
    from pagetile.tiles.triton.launch import INTERPRETED

    hopper = DeviceInfo("cuda", 132, capability=(9, 0))
    fits = Problem(16, 1024, 4096, BF16, has_norm=True)
    assert (module.supports(fits, hopper) is None) == (not INTERPRETED)
    if INTERPRETED:
        return
    assert "capability 9" in module.supports(fits, DeviceInfo("cuda", 132, capability=(8, 0)))
    assert "1 to 64" in module.supports(fits._replace(num_rows=65), hopper)
    assert "float32" in module.supports(fits._replace(dtype=F32), hopper)
    assert "gradient" in module.supports(fits._replace(needs_gradient=True), hopper)
    assert "gaps" in module.supports(fits._replace(is_regular=False), hopper)
    assert "multiples of 16 bytes" in module.supports(fits._replace(size=1028), hopper)
    assert "registers" in module.supports(fits._replace(size=8192), hopper)
    with pytest.raises(UnsupportedError, match="hopper cannot run this"):
        small_linear(torch.zeros(2, 8), torch.zeros(6, 8), impl="hopper")
    with pytest.raises(UnsupportedError, match="impl is 'hopper'"):
        partial_products(torch.zeros(2, 8), torch.zeros(6, 8), impl="hopper")


def ask(predicate, num_rows, num_columns, size, dtype, *device, **options):
    """Ask anew, without cached answers."""
    return predicate.__wrapped__(Problem(num_rows, size, num_columns, dtype, **options), *device)


def test_weights_are_held_in_registers_where_they_fit_on_hopper(monkeypatch):
    monkeypatch.setattr(plan, "MOST_RESIDENT", 16)
    hopper = DeviceInfo("cuda", 132, capability=(9, 0))
    asked = partial(ask, is_resident)
    assert asked(1, 4096, 1024, BF16, hopper)
    assert asked(16, 3072, 1024, F16, hopper, is_gated=True)
    assert asked(16, 1024, 3072, BF16, hopper)
    assert not asked(17, 1024, 3072, BF16, hopper)
    assert not asked(0, 1024, 3072, BF16, hopper)
    assert not asked(8, 4096, 4096, BF16, hopper)  # 32 MiB
    assert not asked(8, 1024, 8192, BF16, hopper)  # too long for registers
    assert not asked(8, 4096, 1024, F32, hopper)
    assert not asked(8, 4096, 1024, BF16, DeviceInfo("cuda", 108, capability=(8, 0)))
    assert not asked(8, 4096, 1024, BF16, DeviceInfo("cpu", 2))


def test_the_kernel_names_the_reason_of_each_refusal():
    hopper = DeviceInfo("cuda", 132, capability=(9, 0))
    triton = pytest.importorskip("pagetile.fused.small_linear.triton")
    fits = Problem(4, 64, 8, F32)
    assert triton.supports(fits, hopper) is None
    assert "rows; 1 to 4" in triton.supports(fits._replace(num_rows=5), hopper)
    assert triton.supports(fits._replace(num_rows=64, dtype=BF16), hopper) is None
    assert "1 to 64" in triton.supports(fits._replace(num_rows=65, dtype=BF16), hopper)
    assert "1 to 4" in triton.supports(fits._replace(num_rows=8, dtype=BF16, has_norm=True), hopper)
    assert "gradient" in triton.supports(fits._replace(needs_gradient=True), hopper)
    assert "gaps" in triton.supports(fits._replace(is_regular=False), hopper)
    assert "multiples of 16 bytes" in triton.supports(fits._replace(size=63), hopper)
    assert "float64" in triton.supports(fits._replace(dtype=torch.float64), hopper)


def test_wrong_arguments_are_named():
    x, weight = torch.zeros(2, 8), torch.zeros(6, 8)
    with pytest.raises(ShapeError, match=r"weight is \[6, 9\]"):
        small_linear(x, torch.zeros(6, 9))
    with pytest.raises(ShapeError, match=r"bias is \[5\], expected \[6\]"):
        small_linear(x, weight, bias=torch.zeros(5))
    with pytest.raises(ShapeError, match=r"residual is \[2, 6\], expected \[2, 3\]"):
        small_linear(x, weight, activation="silu", residual=torch.zeros(2, 6))
    with pytest.raises(ShapeError, match="7 rows"):
        small_linear(x, torch.zeros(7, 8), activation="silu")
    with pytest.raises(UnsupportedError, match="activation is 'tanh'"):
        small_linear(x, weight, activation="tanh")


def test_nothing_is_faster_for_many_rows_or_wide_types():
    assert ask(is_faster, 1, 4096, 4096, BF16)
    assert ask(is_faster, 1, 4096, 4096, BF16, has_norm=True)
    assert not ask(is_faster, 4, 4096, 4096, BF16, has_norm=True)
    assert not ask(is_faster, 0, 4096, 4096, BF16)
    assert not ask(is_faster, 256, 4096, 4096, BF16)
    assert not ask(is_faster, 1, 4096, 4096, torch.float64)
    assert not ask(is_faster, 8, 4096, 4096, F32)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize(("num_rows", "size"), [(5, 256), (33, 1024), (64, 512)])
def test_partial_products_add_up(impl, num_rows, size, dtype, mirror):
    tensors = problem(num_rows, size, 40, dtype)
    with mirror(*tensors.values(), impl=impl) as (x, weight):
        parts = partial_products(x, weight, impl=impl).cpu()
    assert (parts.dtype, parts.shape[1:]) == (F32, (1, num_rows, 40))
    assert len(parts) == (1 if impl == "reference" else plan.plan_parts(
        Problem(num_rows, size, 40, dtype)).parts)  # fmt: skip
    x, weight = (t.double() for t in tensors.values())
    true = x @ weight.T
    assert (parts.double().sum(0) - true).norm() <= 1e-5 * true.norm()


def test_products_of_few_columns_are_split():
    assert ask(is_faster_in_parts, 8, 1024, 3072, BF16)
    assert not ask(is_faster_in_parts, 4, 1024, 3072, BF16)
    assert not ask(is_faster_in_parts, 128, 1024, 3072, BF16)
    assert not ask(is_faster_in_parts, 8, 1024, 3072, F32)
    assert not ask(is_faster_in_parts, 8, 8192, 3072, BF16)
    for size in (512, 2048, 2560, 3072, 8960):
        found = plan.plan_parts(Problem(8, size, 1024, BF16))
        assert size % (found.parts * found.tile_k) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("num_rows", [1, 17, 64, 65, 200, 256, 300])
@pytest.mark.parametrize(
    ("size", "num_columns"), [(2048, 1024), (3072, 1024), (1032, 72), (520, 70), (64, 24)]
)
def test_partial_products_by_tma(size, num_columns, num_rows, dtype, mirror):
    is_hopper_or_skip()
    tensors = problem(num_rows, size, num_columns, dtype)
    with mirror(*tensors.values(), impl="triton") as (x, weight):
        parts = partial_products(x, weight, impl="hopper_ring").cpu()
        again = partial_products(x, weight, impl="hopper_ring").cpu()
    cut = plan.plan_hopper_parts(Problem(num_rows, size, num_columns, dtype))
    assert (parts.dtype, parts.shape) == (F32, (cut.parts, 1, num_rows, num_columns))
    assert torch.equal(parts, again)
    x, weight = (t.double() for t in tensors.values())
    ranges = (t.unflatten(-1, (cut.parts, -1)).movedim(-2, 0) for t in (x, weight))
    true = torch.einsum("pbmk,pnk->pbmn", *ranges)
    assert (parts.double() - true).norm() <= 1e-5 * true.norm()


@pytest.mark.gpu
def test_partial_products_of_a_row_do_not_depend_on_its_neighbours(mirror):
    is_hopper_or_skip()
    for first, last in ((17, 64), (65, 256)):
        tensors = problem(last, 2048, 1024, BF16)
        with mirror(*tensors.values(), impl="triton") as (x, weight):
            every = partial_products(x, weight, impl="hopper_ring").cpu()
            some = partial_products(x[:, -first:], weight, impl="hopper_ring").cpu()
        assert torch.equal(some, every[:, :, -first:])


def test_partial_products_name_the_reason_of_each_refusal_on_hopper():
    pytest.importorskip("triton.experimental.gluon")
    from pagetile.fused.small_linear import hopper_ring as module
    from pagetile.tiles.triton.launch import INTERPRETED

    hopper = DeviceInfo("cuda", 132, capability=(9, 0))
    fits = Problem(100, 2048, 1024, BF16)
    assert (module.supports(fits, hopper) is None) == (not INTERPRETED)
    if INTERPRETED:
        return
    assert "capability 9" in module.supports(fits, DeviceInfo("cuda", 132, capability=(8, 0)))
    assert "no rows" in module.supports(fits._replace(num_rows=0), hopper)
    assert "float32" in module.supports(fits._replace(dtype=F32), hopper)
    assert "gradient" in module.supports(fits._replace(needs_gradient=True), hopper)
    assert "gaps" in module.supports(fits._replace(is_regular=False), hopper)
    assert "multiples of 16 bytes" in module.supports(fits._replace(size=1028), hopper)
    with pytest.raises(UnsupportedError, match="hopper_ring cannot run this"):
        partial_products(torch.zeros(20, 8), torch.zeros(6, 8), impl="hopper_ring")
    assert "a norm" in module.supports(fits._replace(has_norm=True), hopper)
    with pytest.raises(UnsupportedError, match="hopper_ring cannot run this"):
        small_linear(torch.zeros(2, 8), torch.zeros(6, 8), impl="hopper_ring")


def test_dozens_to_hundreds_of_rows_are_multiplied_in_parts_on_hopper():
    hopper = DeviceInfo("cuda", 132, capability=(9, 0))
    asked = partial(ask, is_faster_in_parts_on_hopper)
    for num_rows in (17, 64, 65, 256):
        assert asked(num_rows, 1024, 2048, BF16, hopper)
        assert asked(num_rows, 1024, 3072, F16, hopper)
    assert not asked(16, 1024, 2048, BF16, hopper)  # weights wait in registers
    assert not asked(257, 1024, 2048, BF16, hopper)
    assert not asked(64, 4096, 1024, BF16, hopper)  # columns enough for all multiprocessors
    assert asked(64, 1024, 16384, BF16, hopper)  # 32 MiB stream
    assert asked(2, 4096, 14336, BF16, hopper)
    assert not asked(1, 4096, 14336, BF16, hopper)
    assert not asked(65, 4096, 14336, BF16, hopper)
    assert not asked(8, 6144, 4096, BF16, hopper)  # columns enough for most multiprocessors
    assert not asked(64, 1024, 2056, BF16, hopper)  # rows of no equal parts
    assert not asked(8, 5120, 17408, BF16, hopper)  # 80 programs, and 160 of two parts
    assert not asked(64, 1024, 2048, F32, hopper)
    assert not asked(64, 1024, 2048, BF16, DeviceInfo("cuda", 108, capability=(8, 0)))
    assert not asked(64, 1024, 2048, BF16, DeviceInfo("cpu", 2))
    for num_rows, size in ((64, 2048), (64, 3072), (256, 2560), (256, 8960)):
        found = plan.plan_hopper_parts(Problem(num_rows, size, 1024, BF16))
        assert found.parts > 1
        assert size % (found.parts * found.tile_k) == 0


RING = [(4096, 6144, ""), (4096, 14336, "silu"), (1032, 40, "gelu"), (520, 70, ""),
        (64, 24, "relu"), (2056, 9000, ""), (512, 68000, "")]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize(("size", "num_columns", "activation"), RING)
def test_weights_that_stream_through_shared_memory(size, num_columns, activation, dtype, mirror):
    is_hopper_or_skip()
    for num_rows in (1, 8, 11, 20, 64, 70):
        for has in ({}, {"bias": True}, {"residual": True}, {"bias": True, "residual": True}):
            tensors = problem(num_rows, size, num_columns, dtype, activation, **has)
            check(tensors, activation, "", "hopper_ring", mirror)
            if size * num_columns > 1 << 20:
                break


@pytest.mark.gpu
@pytest.mark.parametrize(("size", "num_columns"), [(14336, 4096), (4096, 4096), (16384, 1024)])
@pytest.mark.parametrize("num_rows", [2, 9, 17, 64])
def test_partial_products_of_large_weights(size, num_columns, num_rows, mirror):
    test_partial_products_by_tma(size, num_columns, num_rows, BF16, mirror)


@pytest.mark.gpu
@pytest.mark.parametrize(("first", "last"), [(1, 8), (9, 16), (17, 32), (33, 64)])
def test_a_row_of_a_streamed_product_does_not_depend_on_its_neighbours(first, last, mirror):
    is_hopper_or_skip()
    tensors = problem(last, 4096, 6144, BF16, "silu")
    every = run(tensors, "silu", "", "hopper_ring", mirror)
    some = run({**tensors, "x": tensors["x"][:, -first:]}, "silu", "", "hopper_ring", mirror)
    assert torch.equal(some, every[:, -first:])


def test_large_weights_stream_on_hopper():
    hopper = DeviceInfo("cuda", 132, capability=(9, 0))
    asked = partial(ask, is_faster_in_ring)
    for num_rows in (2, 8, 16, 64):
        assert asked(num_rows, 6144, 4096, BF16, hopper)
        assert asked(num_rows, 14336, 4096, F16, hopper, is_gated=True)
        assert asked(num_rows, 151936, 1024, BF16, hopper)
    assert not asked(1, 6144, 4096, BF16, hopper)
    assert not asked(8, 5120, 17408, BF16, hopper)  # too few programs
    assert not asked(65, 6144, 4096, BF16, hopper)
    assert not asked(8, 1024, 4096, BF16, hopper)  # 8 MiB wait in registers
    assert not asked(8, 6144, 4096, F32, hopper)
    assert not asked(8, 6144, 4100, BF16, hopper)
    assert not asked(8, 6144, 4096, BF16, DeviceInfo("cuda", 108, capability=(8, 0)))
    assert not asked(8, 6144, 4096, BF16, DeviceInfo("cpu", 2))


def test_parts_of_streamed_weights_are_whole_tiles():
    for size in (2304, 4096, 4224, 8320, 12288, 14336):
        found = plan.plan_hopper_parts(Problem(16, size, 4096, BF16))
        assert found.parts == (1 if size % 256 else 2)
        assert size % (found.parts * found.tile_k) == 0


def test_a_gated_product_of_many_rows_has_no_wide_tiles():
    """Tiles of 128 columns would leave room for five slots."""
    tiles = {rows: plan.plan_ring(Problem(rows, 4096, 14336, BF16, True)) for rows in (32, 33)}
    assert {rows: found.tile_n for rows, found in tiles.items()} == {32: 128, 33: 64}
    assert tiles[33].stages > 5


@pytest.mark.parametrize("num_rows", [2, 8, 9, 17, 33, 64])
def test_slots_of_streamed_weights_fill_shared_memory(num_rows):
    for size, num_columns, is_gated in (
        (4096, 6144, False), (4096, 14336, True), (2560, 9728, True), (5120, 17408, True),
        (4096, 128256, False), (1024, 151936, False), (1032, 9000, True),
    ):  # fmt: skip
        found = plan.plan_ring(Problem(num_rows, size, num_columns, BF16, is_gated))
        rows = found.tile_m + (1 + is_gated) * found.tile_n
        is_shared = num_columns > 65536  # by two programs of an output head
        room = (110 if is_shared else 220) << 10
        slot = rows * found.tile_k * 2
        is_whole = found.stages == -(-size // found.tile_k)
        assert room - slot < slot * found.stages <= room or is_whole
        assert found.stages >= 4
        assert is_shared == (found.ahead == 0)
        assert found.tile_m >= min(num_rows, 64)
        assert found.parts == 1
    for size, num_columns in ((4096, 4096), (14336, 4096), (9728, 2560), (17408, 5120)):
        found = plan.plan_hopper_parts(Problem(num_rows, size, num_columns, BF16))
        assert size % (found.parts * found.tile_k) == 0
        assert 66 <= found.parts * -(-num_columns // found.tile_n) <= 132


# --- on a CPU -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("has", [{}, {"bias": True}, {"residual": True, "bias": True}], ids=str)
@pytest.mark.parametrize("num_rows", [1, 2, 4, 7, 64, 65, 131, 132])
@pytest.mark.parametrize(("size", "num_columns"), [(32, 5), (96, 16), (320, 431), (1184, 37)])
def test_rows_on_a_cpu(size, num_columns, num_rows, has, dtype, mirror):
    check(problem(num_rows, size, num_columns, dtype, **has), "", "", "cpu", mirror)


def test_a_norm_and_an_activation_on_a_cpu(mirror):
    check(problem(3, 64, 24, F32, "silu", "rounded"), "silu", "rounded", "cpu", mirror)


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("size", [160, 1184])
def test_a_row_on_a_cpu_gets_the_same_bits_beside_any_others(size, dtype):
    tensors = problem(148, size, 300, dtype, bias=True)
    x, options = tensors.pop("x")[0], {"impl": "cpu", **tensors}
    whole = small_linear(x, **options)
    for rows in (slice(0, 1), slice(3, 5), slice(9, 16), slice(63, 147)):
        assert torch.equal(small_linear(x[rows], **options), whole[rows])


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_a_row_on_a_cpu_is_not_reached_by_others_nor_by_what_lies_around(dtype):
    x, weight = problem(5, 64, 21, dtype).values()
    alone = small_linear(x, weight, impl="cpu")
    memory = torch.full((3 * 21 + 21, 64), torch.nan, dtype=dtype)
    memory[21:42] = weight
    among = x.clone()
    among[:, 2] = torch.nan
    out = small_linear(among, memory[21:42], impl="cpu")
    assert out[:, 2].isnan().all()
    kept = [0, 1, 3, 4]
    assert torch.equal(out[:, kept], alone[:, kept])


def test_rows_on_a_cpu_by_any_number_of_threads():
    x, weight = problem(6, 1024, 1100, F32).values()
    before = torch.get_num_threads()
    found = []
    try:
        for num_threads in (1, 2, 5):
            torch.set_num_threads(num_threads)
            found.append(small_linear(x, weight, impl="cpu"))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_where_a_cpu_is_faster_than_torch(monkeypatch):
    avx512 = frozenset({"sse2", "avx512bw"})
    monkeypatch.setattr(plan, "cpu_features", lambda: avx512)
    asked = partial(ask, is_faster_on_cpu)
    assert asked(1, 1024, 1024, BF16)
    assert asked(64, 4096, 4096, F32)
    assert not asked(65, 4096, 4096, F32)
    assert not asked(0, 4096, 4096, F32)
    assert not asked(1, 4096, 4100, F32)
    assert not asked(1, 256, 256, F32)
    assert asked(2, 256, 256, F32)
    assert asked(1, 256, 256, BF16)
    assert not asked(2, 64, 64, F32)
    assert not asked(1, 64, 256, BF16)
    assert not asked(1, 4096, 4096, torch.float64)
    assert asked(1000, 4096, 4096, F16)
    assert not asked(65, 4096, 4096, BF16)
    monkeypatch.setattr(plan, "cpu_features", lambda: frozenset({"sse2", "avx2"}))
    assert asked(1000, 4096, 4096, BF16)
    assert not asked(65, 4096, 4096, F32)
    monkeypatch.setattr(plan, "cpu_features", lambda: frozenset({"neon"}))
    assert not asked(65, 4096, 4096, F16)
    monkeypatch.setattr(plan, "cpu_features", lambda: avx512 | {"amx-bf16", "avx512fp16"})
    for dtype, most in ((BF16, 4), (F16, 16)):
        assert asked(most, 4096, 4096, dtype)
        assert not asked(most + 1, 4096, 4096, dtype)
    assert asked(64, 4096, 4096, F32)


def test_what_a_cpu_does_not_take():
    for x, reason in (
        (torch.zeros(0, 64), "x has no rows"),
        (torch.zeros(1, 64, requires_grad=True), "a gradient is wanted"),
        (torch.zeros(1, 64).double(), "float64"),
        (torch.zeros(1, 48), "multiples of 32 run"),
    ):
        with pytest.raises(UnsupportedError, match=reason):
            small_linear(x, torch.zeros(8, x.shape[1], dtype=x.dtype), impl="cpu")
    with pytest.raises(UnsupportedError, match="a tensor has gaps"):
        small_linear(torch.zeros(1, 64), torch.zeros(8, 128)[:, ::2], impl="cpu")
