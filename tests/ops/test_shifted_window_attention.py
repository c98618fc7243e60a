"""``shifted_window_attention`` against padding, rolling and cutting a map in plain torch."""

import itertools
import math
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F

from pagetile import (
    DTypeError,
    ShapeError,
    UnsupportedError,
    rel_offsets,
    shift_regions,
    shifted_window_attention,
    window_attention,
)
from pagetile.ops.window_attention.layout import gather_rows, layout
from pagetile.testing import poisoned_memory

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
ON_GPU = torch.cuda.is_available()


@dataclass(frozen=True)
class Case:
    grid: tuple[int, ...]
    window: tuple[int, ...]
    shift: tuple[int, ...] | None = None
    clamped: tuple[int, ...] | None = None
    """The window where it is another than ``window``."""
    batch: int = 2
    dtype: torch.dtype = F32
    pads: bool = True
    """Whether padded tokens have rows of their own."""

    def __str__(self):
        words = ["x".join(map(str, sizes)) for sizes in (self.grid, self.window, self.shift or ())]
        return "-".join([*filter(None, words), str(self.dtype)[6:]] + ["zeros"] * (not self.pads))


CASES = [
    Case((8, 12), (4, 4)),
    Case((8, 12), (4, 4), (2, 2)),
    Case((7, 10), (4, 3)),
    Case((7, 10), (4, 3), (2, 1)),
    Case((7, 10), (4, 3), (0, 2), pads=False),
    Case((5, 7, 4), (3, 3, 2), batch=1),
    Case((5, 7, 4), (3, 3, 2), (1, 1, 1)),
    Case((5, 7, 4), (3, 3, 2), (2, 0, 1), dtype=F16),
    Case((11,), (4,), (3,)),
    Case((9, 3), (4, 5), (2, 2), clamped=(4, 3)),
    Case((2, 9, 4), (4, 4, 4), (2, 2, 2), clamped=(2, 4, 4)),
    Case((3, 2, 4), (5, 5, 5), (2, 2, 2), clamped=(3, 2, 4), batch=3),
]
SLOW = [CASES[n] for n in (0, 1, 2, 4, 5, 7, 11)]  # the other cases are fast
HEADS, SIZE = 2, 8


class Inputs:
    def __init__(self, case, device="cpu"):
        self.case, random = case, torch.Generator().manual_seed(len(str(case)))

        def normal(*shape):
            return torch.randn(shape, generator=random).to(device)

        rows = math.prod(2 * length - 1 for length in case.window)
        self.tensors = {"qkv": normal(case.batch, *case.grid, 3, HEADS, SIZE).to(case.dtype)}
        if case.pads:
            self.tensors["padding"] = normal(3, HEADS, SIZE).to(case.dtype)
        self.tensors["bias_table"] = normal(rows, HEADS)
        self.dout = normal(case.batch, *case.grid, HEADS, SIZE)
        self.dlse = normal(case.batch, *case.grid, HEADS)

    def run(self, attend, **options):
        """The result, and its gradients by name."""
        leaves = {name: each.detach().requires_grad_() for name, each in self.tensors.items()}
        case = self.case
        out, lse = attend(**leaves, window=case.window, shift=case.shift, **options)
        total = (out * self.dout.to(out.dtype)).sum() + (lse * self.dlse.to(lse.dtype)).sum()
        found = torch.autograd.grad(total, leaves.values())
        return {"out": out.detach(), "lse": lse.detach()} | dict(zip(leaves, found, strict=True))


def in_steps(case):
    """The same in plain torch, as models do it, around ``window_attention``."""

    def attend(qkv, padding=None, *, window, shift, bias_table, impl="auto"):
        window = case.clamped or window
        grid, axes = case.grid, tuple(range(1, 1 + len(case.grid)))
        shift = [
            step if size > length else 0
            for size, length, step in zip(grid, window, shift or [0] * len(grid), strict=True)
        ]
        extra = [-size % length for size, length in zip(grid, window, strict=True)]
        behind = [number for size in reversed(extra) for number in (0, size)]
        x = F.pad(qkv, (0,) * 6 + tuple(behind))
        if padding is not None:
            inside = F.pad(torch.ones(grid, dtype=torch.bool, device=qkv.device), behind)
            x = torch.where(inside[..., None, None, None], x, padding)
        padded = x.shape[1 : 1 + len(grid)]
        x = cut(x.roll([-step for step in shift], axes), window)
        regions = shift_regions(padded, window, shift) if any(shift) else None
        out, lse = window_attention(
            *x.permute(2, 0, 3, 1, 4),
            bias_table=bias_table,
            rel_offsets=rel_offsets(case.window, num_tokens=math.prod(window)).to(qkv.device),
            regions=None if regions is None else regions.to(qkv.device),
            impl=impl,
        )
        whole = tuple(slice(size) for size in grid)
        return tuple(
            join(each.transpose(1, 2), window, padded).roll(shift, axes)[(slice(None), *whole)]
            for each in (out, lse)
        )

    return attend


def cut(x, window):
    axes = len(window)
    grid, row = x.shape[1 : 1 + axes], x.shape[1 + axes :]
    split = [n for size, length in zip(grid, window, strict=True) for n in (size // length, length)]
    x = x.view(len(x), *split, *row)
    order = [0, *range(1, 2 * axes, 2), *range(2, 2 * axes + 1, 2)]
    x = x.permute(*order, *range(2 * axes + 1, x.dim()))
    return x.reshape(-1, math.prod(window), *row)


def join(x, window, grid):
    axes, row = len(window), x.shape[2:]
    counts = [size // length for size, length in zip(grid, window, strict=True)]
    x = x.reshape(-1, *counts, *window, *row)
    order = [0, *itertools.chain(*((1 + axis, 1 + axes + axis) for axis in range(axes)))]
    x = x.permute(*order, *range(2 * axes + 1, x.dim()))
    return x.reshape(-1, *grid, *row)


IMPLEMENTATIONS = ["cpu", "reference", pytest.param("triton", marks=pytest.mark.interpret)]


@pytest.fixture(params=IMPLEMENTATIONS)
def impl(request):
    return request.param


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_is_the_steps_bit_for_bit(case, impl):
    """Exact, since it only copies; only the padding's gradient is a sum."""
    if impl == "triton" and not ON_GPU and case in SLOW:
        pytest.skip("seconds under the interpreter")
    inputs = Inputs(case, "cuda" if impl == "triton" and ON_GPU else "cpu")
    expected = inputs.run(in_steps(case), impl=impl)
    with poisoned_memory():
        found = inputs.run(shifted_window_attention, impl=impl)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if name == "padding":
            unit = torch.finfo(case.dtype).eps
            torch.testing.assert_close(found[name], value, rtol=8 * unit, atol=64 * unit)
        else:
            assert torch.equal(found[name], value), name
    assert found["out"].is_contiguous()


@pytest.mark.parametrize("shift", [None, (1, 1, 1)])
def test_the_bias_of_a_layer_is_what_padding_becomes(shift):
    """Models pad with zeros before they apply the layer."""
    layer, x = torch.nn.Linear(10, 3 * HEADS * SIZE).double(), torch.randn(2, 4, 5, 3, 10).double()
    options = {"window": (3, 3, 3), "shift": shift}
    qkv = layer(x).unflatten(-1, (3, HEADS, SIZE))
    padding = layer.bias.view(3, HEADS, SIZE)
    found = shifted_window_attention(qkv, padding=padding, **options)
    padded = layer(F.pad(x, (0, 0, 0, 0, 0, 1, 0, 2))).unflatten(-1, (3, HEADS, SIZE))
    expected = shifted_window_attention(padded, **options)
    here = (slice(None), slice(4), slice(5), slice(3))
    torch.testing.assert_close(found.out, expected.out[here])
    weights = torch.randn_like(found.out)
    gradients = [
        torch.autograd.grad((out * weights).sum(), (layer.weight, layer.bias))
        for out in (found.out, expected.out[here])
    ]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize(
    "case",
    [
        Case((3, 4), (2, 3), (1, 1), batch=1),
        Case((2, 3), (3, 2), (1, 1), clamped=(2, 2)),
        Case((3,), (2,), None),
    ],
    ids=str,
)
def test_gradcheck_in_float64(case):
    inputs = Inputs(case)
    tensors = {name: each.double().requires_grad_() for name, each in inputs.tensors.items()}

    def attend(*values):
        named = dict(zip(tensors, values, strict=True))
        options = {"window": case.window, "shift": case.shift, "mask_value": -2.0}
        return tuple(shifted_window_attention(**named, **options))

    assert torch.autograd.gradcheck(attend, tuple(tensors.values()))


def test_offsets_of_a_clamped_window_may_be_true_ones():
    inputs = Inputs(Case((2, 9), (4, 4)))
    options = {**inputs.tensors, "window": (4, 4)}
    first = shifted_window_attention(**options).out
    given = shifted_window_attention(**options, rel_offsets=rel_offsets((4, 4), num_tokens=8)).out
    true = shifted_window_attention(**options, rel_offsets=rel_offsets((2, 4), (4, 4))).out
    assert torch.equal(first, given)
    # Rows of four: the first eight offsets of a 4 × 4 window are those of a 2 × 4 window.
    assert torch.equal(first, true)
    narrow = Inputs(Case((9, 2), (4, 4)))
    options = {**narrow.tensors, "window": (4, 4)}
    first = shifted_window_attention(**options).out
    true = shifted_window_attention(**options, rel_offsets=rel_offsets((4, 2), (4, 4))).out
    assert not torch.allclose(first, true, atol=1e-2)


def test_swin_v2_and_every_other_option_reach_the_windows():
    inputs = Inputs(Case((8, 8), (4, 4), (2, 2)))
    base = {**inputs.tensors, "window": (4, 4), "shift": (2, 2), "logit_scale": torch.ones(2)}
    plain = shifted_window_attention(**base).out
    changes = [{"mask_value": -1.0}, {"softmax_scale": 0.5}, {"qk_norm_eps": 10.0}]
    changes += [{"logit_scale": None}, {"shift": None}, {"shift": (0, 2)}, {"window": (4, 8)}]
    for change in changes:
        if "window" in change:
            change = {**change, "bias_table": torch.zeros(7 * 15, HEADS)}
        changed = shifted_window_attention(**base | change).out
        assert (changed - plain).abs().max() > 1e-3, change


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4, 5), (0, 2, 1, 3, 5, 4), (0, 3, 4, 5, 1, 2)])
def test_any_strides(order, impl):
    if impl == "triton" and not ON_GPU and order[1] != 3:
        pytest.skip("seconds under the interpreter")
    device = "cuda" if impl == "triton" and ON_GPU else "cpu"
    inputs = Inputs(Case((7, 10), (4, 3), (2, 1)), device)
    expected = inputs.run(shifted_window_attention, impl=impl)
    qkv, back = inputs.tensors["qkv"], [order.index(at) for at in range(6)]
    wide = torch.full([size + 1 for size in qkv.permute(order).shape], math.nan, device=device)
    wide[tuple(slice(size) for size in qkv.permute(order).shape)] = qkv.permute(order)
    inputs.tensors["qkv"] = wide[tuple(slice(size) for size in qkv.permute(order).shape)].permute(
        back
    )
    found = inputs.run(shifted_window_attention, impl=impl)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_no_maps():
    qkv = torch.empty(0, 5, 7, 3, HEADS, SIZE, requires_grad=True)
    result = shifted_window_attention(qkv, window=(3, 3), shift=(1, 1))
    assert result.out.shape == (0, 5, 7, HEADS, SIZE)
    assert torch.autograd.grad(result.out.sum(), qkv)[0].shape == qkv.shape


# --- as torch sees it -------------------------------------------------------------------------


@pytest.mark.filterwarnings("error")
def test_a_compiled_call_takes_a_map_of_another_size():
    compiled = torch.compile(shifted_window_attention, fullgraph=True, backend="aot_eager")
    for grid in ((5, 4), (7, 6), (8, 6)):
        qkv = torch.randn(1, *grid, 3, 2, 8)
        found = compiled(qkv, window=(3, 3), shift=(1, 1))
        expected = shifted_window_attention(qkv, window=(3, 3), shift=(1, 1))
        assert torch.equal(found.out, expected.out)
    torch._dynamo.reset()


def test_torch_compile_makes_one_graph():
    for case in (CASES[3], CASES[10]):
        inputs = Inputs(case)
        torch._dynamo.reset()
        compiled = torch.compile(shifted_window_attention, fullgraph=True, backend="aot_eager")
        found = inputs.run(compiled)
        expected = inputs.run(shifted_window_attention)
        assert all(torch.equal(found[name], expected[name]) for name in found)
    torch._dynamo.reset()


@pytest.mark.parametrize("padding", [None, torch.randn(2, 4, dtype=F64, requires_grad=True)])
def test_the_copies_are_operators_that_torch_can_trace(padding):
    where = layout((5, 4), (3, 3), (1, 1), torch.device("cpu"))
    x = torch.randn(2, 20, 2, 4, dtype=F64, requires_grad=True)
    checks = (
        "test_schema",
        "test_autograd_registration",
        "test_faketensor",
        "test_aot_dispatch_dynamic",
    )
    operators = torch.ops.pagetile
    cut_windows, join_windows = operators.cut_windows.default, operators.join_windows.default
    torch.library.opcheck(cut_windows, (x, *where[1:4], padding), test_utils=checks)
    x = torch.randn(2, 36, 2, 4, dtype=F64, requires_grad=True)
    torch.library.opcheck(join_windows, (x, *where[1:4]), test_utils=checks)


def test_under_autocast_the_map_is_cast_and_parameters_keep_their_types():
    inputs = Inputs(Case((7, 10), (4, 3), (2, 1)))
    with torch.autocast("cpu", BF16):
        found = inputs.run(shifted_window_attention)
    assert found["out"].dtype == BF16
    assert found["qkv"].dtype == found["padding"].dtype == found["bias_table"].dtype == F32
    inputs.tensors |= {name: inputs.tensors[name].to(BF16) for name in ("qkv", "padding")}
    expected = inputs.run(shifted_window_attention)
    assert torch.equal(found["out"], expected["out"])
    assert torch.equal(found["qkv"].to(BF16), expected["qkv"])
    assert torch.equal(found["padding"].to(BF16), expected["padding"])
    assert not torch.equal(found["padding"], found["padding"].to(BF16).to(F32))  # summed in float32


def test_a_layout_made_under_a_mode_serves_no_later_call():
    from torch._subclasses import FakeTensorMode

    layout.__globals__["_make"].cache_clear()
    case = Case((7, 10), (4, 3), (2, 1))
    inputs = Inputs(case)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = {name: mode.from_tensor(each) for name, each in inputs.tensors.items()}
        out = shifted_window_attention(**fake, window=case.window, shift=case.shift).out
        assert out.shape == (2, 7, 10, HEADS, SIZE)
    with torch.inference_mode():
        shifted_window_attention(**inputs.tensors, window=case.window, shift=case.shift)
    expected, found = inputs.run(in_steps(case)), inputs.run(shifted_window_attention)
    assert torch.equal(found["qkv"], expected["qkv"])


# --- copies on a GPU --------------------------------------------------------------------------


@pytest.mark.interpret
@pytest.mark.parametrize(
    ("row", "dtype"),
    [
        *itertools.product([(3, 2, 8), (3,), (5, 1), (144,)], [F64, F32, F16, BF16]),
        pytest.param((1100,), F64, marks=pytest.mark.gpu),  # seconds under the interpreter
        ((1100,), BF16),
    ],
    ids=str,
)
def test_gathered_rows_equal_torchs(row, dtype):
    from pagetile.ops.window_attention.triton import gather_rows as kernel

    device = "cuda" if ON_GPU else "cpu"
    random = torch.Generator().manual_seed(row[0])
    index = torch.randint(-1, 50, (131,), generator=random, dtype=torch.int32).to(device)
    absent = (index < 0).nonzero().squeeze(1)
    values = torch.randn((3, 51, *row), generator=random).to(device, dtype)
    for x in (values, values[:, 1:], values.transpose(0, 1)[:50].transpose(0, 1), values[..., :1]):
        x = x[:, :50]
        for filling in (None, torch.randn(x.shape[2:], generator=random).to(device, dtype)):
            on_cpu = (None if t is None else t.cpu() for t in (x, index, absent, filling))
            expected = gather_rows(*on_cpu)
            with poisoned_memory():
                found = kernel.gather_rows(x, index, filling)
            assert torch.equal(found.cpu(), expected)


# --- what cannot be ---------------------------------------------------------------------------

QKV = torch.zeros(2, 7, 10, 3, HEADS, SIZE)
WRONG = {
    "axes": ({"window": (4, 3, 2)}, ShapeError, r"qkv has 6 dimensions.*expected 7"),
    "no three": ({"qkv": QKV[:, :, :, :2]}, ShapeError, "qkv has 2 in front of its heads"),
    "integers": ({"qkv": QKV.long()}, DTypeError, "qkv is int64"),
    "shift's axes": ({"shift": (1,)}, ShapeError, r"window=\[4, 3\] and shift=\[1\]"),
    "large shift": ({"shift": (1, 3)}, ShapeError, r"shift=\[1, 3\]"),
    "negative shift": ({"shift": (-1, 0)}, ShapeError, r"shift is \(-1, 0\), expected an integer"),
    "one shift": ({"shift": 1}, ShapeError, "shift is 1, expected an integer for each axis"),
    "shift of floats": ({"shift": (1.0, 0.0)}, ShapeError, r"shift is \(1.0, 0.0\)"),
    "no window": ({"window": (4, 0)}, ShapeError, r"window is \(4, 0\), expected an integer"),
    "one window": ({"window": 4}, ShapeError, "window is 4, expected an integer for each axis"),
    "no axes": ({"window": ()}, ShapeError, r"window is \(\), expected"),
    "an array": ({"qkv": QKV.numpy()}, DTypeError, "qkv is of type ndarray"),
    "no grid": ({"qkv": QKV[:, :0]}, ShapeError, r"qkv's grid is \[0, 10\]"),
    "padding's heads": (
        {"padding": torch.zeros(3, 3, SIZE)}, ShapeError, "padding has num_heads=3 but qkv has 2",
    ),
    "padding's type": ({"padding": torch.zeros(3, HEADS, SIZE).int()}, DTypeError, "padding is"),
    "padding's place": (
        {"padding": torch.zeros(3, HEADS, SIZE, device="meta")}, ShapeError, "padding is on meta",
    ),
    "table": ({"bias_table": torch.zeros(33, HEADS)}, ShapeError, "bias_table has 33 rows"),
    "another window's table": (
        {"bias_table": torch.zeros(49, HEADS)}, ShapeError, "49 rows, expected 35 for window=",
    ),
    "table's heads": ({"bias_table": torch.zeros(35, 3)}, ShapeError, "bias_table has num_heads=3"),
    "offsets": ({"rel_offsets": rel_offsets((4, 4))}, ShapeError, "rel_offsets has num_tokens=16"),
    "no table": (
        {"bias_table": None, "rel_offsets": rel_offsets((4, 3))}, ShapeError, "without bias_table",
    ),
    "a name": ({"impl": "cuda"}, UnsupportedError, "impl is 'cuda'"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_errors_name_the_argument(what):
    changes, error, message = WRONG[what]
    arguments = {"qkv": QKV, "window": (4, 3), "bias_table": torch.zeros(35, HEADS), **changes}
    with pytest.raises(error, match=message):
        shifted_window_attention(**arguments)
