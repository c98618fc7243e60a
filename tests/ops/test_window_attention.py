"""``window_attention`` against float64, forward and backward, on all implementations here."""

import copy
import itertools
import math
import warnings
from dataclasses import dataclass, replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from pagetile import (
    AttentionOutput,
    DTypeError,
    ShapeError,
    UnsupportedError,
    explain_window_attention,
    rel_offsets,
    shift_regions,
    window_attention,
)
from pagetile.ops.window_attention import reference
from pagetile.testing import poisoned_memory

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
ON_GPU = torch.cuda.is_available()


@dataclass(frozen=True)
class Case:
    """Windows of a shifted map, for a number of images."""

    window: tuple[int, ...] = (3, 3)
    num_heads: int = 2
    head_size: int = 8
    dtype: torch.dtype = F32
    images: int = 2
    bias: str = "table"
    mask: str = "regions"
    cosine: bool = False
    num_tokens: int | None = None
    mask_value: float = -100.0
    softmax_scale: float | None = None

    def __str__(self):
        window = "x".join(map(str, self.window))
        words = [window, f"h{self.num_heads}", f"d{self.head_size}", str(self.dtype)[6:]]
        words += [f"n{self.num_tokens}"] * bool(self.num_tokens)
        words += [self.bias, self.mask] + ["cosine"] * self.cosine
        return "-".join(words + [f"{self.mask_value:g}"] * (self.mask_value != -100))


class Inputs:
    """A case's tensors: q, k and v are views of one packed tensor with NaN between its rows."""

    def __init__(self, case, device="cpu"):
        self.case = case
        self.random = torch.Generator().manual_seed(len(str(case)) + case.head_size)
        num_tokens = case.num_tokens or math.prod(case.window)
        grid, shift = [2 * n for n in case.window], [n // 2 for n in case.window]
        num_masks = 2 ** len(case.window)
        self.num_windows, heads = num_masks * case.images, case.num_heads
        packed = torch.full((self.num_windows, num_tokens, 3, heads + 1, case.head_size), math.nan)
        packed = packed.to(case.dtype)
        packed[..., :heads, :] = self.normal(*packed[..., :heads, :].shape)
        views = packed.to(device)[..., :heads, :].permute(2, 0, 3, 1, 4).unbind(0)
        self.tensors = dict(zip("qkv", views, strict=True))
        self.options = {"mask_value": case.mask_value, "softmax_scale": case.softmax_scale}
        pairs = (num_tokens, num_tokens)
        if case.bias == "table":
            rows = math.prod(2 * n - 1 for n in case.window)
            self.tensors["bias_table"] = self.normal(rows, heads).to(device)
            self.options["rel_offsets"] = rel_offsets(case.window, num_tokens=num_tokens).to(device)
        elif case.bias in ("dense", "one"):
            self.tensors["bias"] = self.normal(1 + (case.bias == "dense"), heads, *pairs).to(device)
        if case.mask == "regions":
            regions = shift_regions(grid, case.window, shift)[:, :num_tokens]
            self.options["regions"] = regions.to(device)
        elif case.mask == "many":  # regions, more in a window than a shift makes
            low, high = torch.randint(0, 9, (2, num_masks, num_tokens), generator=self.random)
            # Neighbours that are one float32, and as many that are one int32.
            self.options["regions"] = (2**24 + low + (high // 4 << 32)).to(device)
        elif case.mask == "float":
            self.options["mask"] = self.normal(num_masks, *pairs).to(device)
        elif case.mask == "bool":
            hidden = torch.rand(num_masks, *pairs, generator=self.random) < 0.3
            self.options["mask"] = ~hidden.to(device)
        if case.cosine:
            scales = torch.tensor([1.0, 4.0, 5.0]).repeat(heads)[:heads]  # the last is clamped
            self.tensors["logit_scale"] = scales.to(device)
        self.dout = self.normal(*views[0].shape).to(device)
        self.dlse = self.normal(*views[0].shape[:3]).to(device)

    def normal(self, *shape):
        return torch.randn(shape, generator=self.random)

    def leaves(self, dtype=None):
        """The tensors as leaves; with the same strides unless their type changes."""
        return {
            name: (tensor if dtype is None else tensor.to(dtype)).detach().requires_grad_()
            for name, tensor in self.tensors.items()
        }

    def attend(self, impl, dtype=None, attend=window_attention, **more):
        """The result, and its gradients by name."""
        leaves = self.leaves(dtype)
        options = {
            name: value.to(dtype)
            if dtype is not None and isinstance(value, torch.Tensor) and value.is_floating_point()
            else value
            for name, value in self.options.items()
        }
        result = attend(**leaves, **options, **({"impl": impl} if impl else {}), **more)
        total = (result.out * self.dout.to(result.out.dtype)).sum()
        if self.dlse is not None:
            total = total + (result.lse * self.dlse.to(result.lse.dtype)).sum()
        gradients = torch.autograd.grad(total, leaves.values())
        found = {"out": result.out.detach(), "lse": result.lse.detach()}
        return found | dict(zip(leaves, gradients, strict=True))


def eager(
    q, k, v, *, bias_table=None, rel_offsets=None, bias=None, regions=None, mask=None,
    mask_value=-100.0, softmax_scale=None, logit_scale=None,
):  # fmt: skip
    """Swin's attention as model code writes it, with its index and its dense mask."""
    dtype, num_windows, num_tokens = q.dtype, q.shape[0], q.shape[2]
    if logit_scale is None:
        scores = q * (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale) @ k.mT
    else:
        eps = max(1e-12, torch.finfo(dtype).tiny)
        q, k = (torch.nn.functional.normalize(t, dim=-1, eps=eps) for t in (q, k))
        factor = logit_scale.clamp(max=math.log(100)).exp().to(dtype)
        scores = q @ k.mT * (factor[:, None, None] if factor.ndim == 1 else factor)
    if bias_table is not None:
        index = rel_offsets[:, None] - rel_offsets[None, :] + (len(bias_table) - 1) // 2
        rows = bias_table[index.flatten().long()].view(num_tokens, num_tokens, -1)
        scores = scores + rows.permute(2, 0, 1).to(dtype)
    if bias is not None:
        scores = scores + bias.to(dtype).repeat(num_windows // len(bias), 1, 1, 1)
    if regions is not None:
        apart = regions[:, :, None] != regions[:, None, :]
        mask = torch.zeros(apart.shape, dtype=dtype, device=q.device)
        mask = mask.masked_fill(apart, mask_value)
    elif mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=dtype, device=q.device).masked_fill(~mask, mask_value)
    if mask is not None:
        scores = scores + mask.to(dtype).repeat(num_windows // len(mask), 1, 1)[:, None]
    wide = torch.promote_types(dtype, F32)
    return AttentionOutput(scores.softmax(dim=-1) @ v, scores.to(wide).logsumexp(dim=-1))


def errors(found, expected):
    return {name: (found[name].double() - expected[name]).abs().max().item() for name in expected}


def scale_gradient_by_rows(inputs):
    """The largest sum of absolute row contributions to a scale's gradient, which itself cancels."""
    per_row = inputs.tensors["logit_scale"][None, :, None, None]
    per_row = per_row.expand(*inputs.tensors["q"].shape[:3], 1).clone()
    apart = copy.copy(inputs)
    apart.tensors = inputs.tensors | {"logit_scale": per_row}
    shares = apart.attend(None, F64, eager)["logit_scale"]
    return shares.abs().sum(dim=(0, 2, 3)).max().item()


def assert_matches(inputs, found, times=2):
    """At most ``times`` as wrong as model code in the same type, plus a rounding of the largest.

    A gradient's weights come from the lse, whose own rounding in float32 counts as well, in a
    scale's gradient once for each row. Model code in float64 must equal the reference, so that a
    mistake in either fails by itself and cannot widen the tolerance.
    """
    expected = inputs.attend("reference", F64)
    for name, mistake in errors(inputs.attend(None, F64, eager), expected).items():
        largest = 1 + expected[name].abs().max().item()
        assert mistake <= 1e-9 * largest, (
            f"{name}: model code and reference differ by {mistake:.3g}"
        )
    common = inputs.attend(None, inputs.case.dtype, eager)
    allowed, mistakes = errors(common, expected), errors(found, expected)
    lse_unit = torch.finfo(F32).eps / 2 * (1 + expected["lse"].abs().max().item())
    for name, mistake in mistakes.items():
        unit = torch.finfo(F32 if name == "lse" else inputs.case.dtype).eps
        largest = 1 + expected[name].abs().max().item()
        spread = scale_gradient_by_rows(inputs) if name == "logit_scale" else largest
        band = 4 * unit * largest + lse_unit * max(largest, spread)
        assert mistake <= times * allowed[name] + band, (
            f"{name} of {inputs.case} is off by {mistake:.3g}; model code by {allowed[name]:.3g}"
        )
        wanted = inputs.tensors.get(name, inputs.tensors["q"]).dtype
        assert found[name].dtype == (F32 if name == "lse" else wanted), name


def skip_what_cannot_run(impl, case):
    if impl == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("not a Hopper GPU")
    if impl == "triton" and case.dtype == BF16 and not ON_GPU:
        pytest.skip("Triton 3.6's interpreter does not round to bfloat16 as a GPU does")
    if impl == "cpu" and case.bias == "dense":
        pytest.skip("several biases are the reference's on a CPU")


IMPLEMENTATIONS = ["cpu", "reference", pytest.param("triton", marks=pytest.mark.interpret)]


@pytest.fixture(params=IMPLEMENTATIONS)
def impl(request):
    return request.param


def make(case, impl):
    skip_what_cannot_run(impl, case)
    return Inputs(case, "cuda" if impl in ("triton", "hopper") and ON_GPU else "cpu")


CASES = [
    # Head sizes and types.
    *(Case(head_size=d) for d in (4, 10, 12, 16, 24, 30, 32, 64)),
    *(Case((4, 4), head_size=d, dtype=F16) for d in (4, 10, 16, 30, 64)),
    Case((4, 4), dtype=BF16),
    # Token counts: one tile, several, ragged ones, a single token.
    Case((1, 1)),
    Case((7, 7), dtype=F16),
    Case((7, 7), head_size=30, images=1),
    Case((2, 3, 5)),
    Case((5, 4, 4), dtype=F16),
    Case((9, 9), head_size=4),
    Case((10, 10), num_heads=1, images=1),  # keys in one tile, queries in two
    # What is added.
    Case(bias="none", mask="none"),
    Case(bias="none"),
    Case(mask="none", num_heads=3),
    Case(bias="dense", mask="bool"),
    Case((4, 5), bias="one", mask="bool", num_heads=3),
    Case((10, 10), bias="one", mask="none", images=1),
    Case(bias="one", dtype=BF16),
    Case((4, 5), mask="float", cosine=True),
    Case(mask="bool", mask_value=-math.inf, dtype=F16),
    Case(bias="dense", mask="float", dtype=F16),
    Case((3, 4, 2), num_tokens=17),  # a clamped window
    Case(mask_value=-math.inf),
    Case(mask_value=-3.0, dtype=F16),
    Case(mask_value=200.0),
    Case((9, 8), mask_value=-3.0, dtype=F16, images=1),
    Case((9, 8), head_size=6, dtype=F16, images=1),  # copies of 4 bytes
    Case(softmax_scale=0.0),
    Case(softmax_scale=-1.5),
    # Swin v2.
    Case(cosine=True, num_heads=3),
    Case((4, 4), cosine=True, num_heads=3, dtype=F16),
    Case((9, 8), cosine=True, num_heads=1, images=1),
    Case(cosine=True, bias="none", mask="none", head_size=30),
    Case(mask="many"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_float64(case, impl):
    inputs = make(case, impl)
    with poisoned_memory():
        found = inputs.attend(impl)
    assert_matches(inputs, found)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_cpu_windows_that_share_rows_of_bias(dtype):
    """Two or three windows a part, whose keys are in the cache at the same time."""
    inputs = make(Case((10, 10), num_heads=4, images=5, dtype=dtype), "cpu")
    assert_matches(inputs, inputs.attend("cpu"))


@pytest.mark.interpret
def test_one_tile_gradients_by_two_kernels_where_one_does_not_fit(monkeypatch):
    pytest.importorskip("triton")
    from pagetile.ops.window_attention import triton as kernels

    choose = kernels._plan_and_keys

    def without_one_tile(*arguments):
        plan, *keys = choose(*arguments)
        return replace(plan, one_tile_stages=0), *keys

    monkeypatch.setattr(kernels, "_plan_and_keys", without_one_tile)
    inputs = make(Case((4, 4)), "triton")
    inputs.tensors["q"][0, 0, 0] = 0  # no numbers to be taken for "this window is mixed"
    assert_matches(inputs, inputs.attend("triton"))


LARGE = [
    *(
        Case((n, n), head_size=32, dtype=dtype)
        for n in (8, 10, 12, 14, 16, 24)
        for dtype in (F16, BF16)
    ),
    *(Case((7, 7, 7), head_size=d, dtype=F16, images=1) for d in (4, 8, 12, 16, 24)),
    Case((6, 6, 6), head_size=16, dtype=F16, images=1),
    *(Case((n, n), head_size=30, dtype=F16, images=1) for n in (8, 10, 16)),
    Case((10, 10), head_size=10, dtype=BF16, images=70),
    *(Case((n, n), head_size=32, images=3) for n in (5, 7, 12, 16)),
    Case((8, 7, 7), head_size=32, dtype=BF16, images=1),
    Case((8, 8, 8), head_size=32, dtype=F16, images=1),
    Case((32, 32), head_size=64, dtype=F16, images=1),
    Case((7, 7, 7), images=1),
    Case((16, 16), head_size=32, dtype=BF16, cosine=True, num_heads=3),
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", LARGE, ids=str)
def test_matches_float64_at_full_size(case):
    inputs = make(case, "triton")
    assert_matches(inputs, inputs.attend("triton"))


D16 = {"num_heads": 3, "head_size": 16, "images": 1}
ON_HOPPER = [
    *(Case((7, 7, 7), dtype=dtype, **D16) for dtype in (F16, BF16)),
    Case((7, 7, 7), dtype=F16, mask="none", **D16 | {"images": 7}),
    Case((7, 7, 7), dtype=F16, mask="many", **D16),
    Case((7, 7, 7), dtype=F16, mask_value=-3.0, **D16 | {"num_heads": 1}),
    Case((7, 7, 7), dtype=F16, mask_value=-math.inf, softmax_scale=-1.5, **D16),
    Case((7, 7, 7), dtype=F16, mask_value=-2e4, **D16),
    Case((7, 7, 7), dtype=BF16, softmax_scale=0.01, **D16),
    Case((7, 7, 7), dtype=F16, softmax_scale=0.0, **D16),
    Case((7, 7, 7), dtype=F16, bias="none", **D16),
    Case((7, 7, 7), dtype=F16, bias="one", **D16),
    Case((24, 24), dtype=BF16, bias="one", mask="none", head_size=32),
    Case((7, 7, 7), dtype=F16, num_tokens=321, **D16 | {"num_heads": 67}),
    Case((14, 14), dtype=F16, head_size=8, images=40),
    Case((15, 15), dtype=BF16, head_size=64),
    Case((7, 7, 7), dtype=F16, head_size=64, images=1),
    Case((16, 16), dtype=BF16, mask="many", mask_value=-2.0, head_size=32),
    Case((16, 16), dtype=F16, **D16 | {"images": 11}),
    Case((16, 16), dtype=F16, mask="none", head_size=32),
    Case((16, 17), dtype=F16, **D16),
    Case((18, 18), dtype=F16, **D16),
    Case((8, 7, 7), dtype=BF16, head_size=32, images=1),
    Case((8, 7, 7), dtype=F16, bias="none", **D16),
    Case((8, 8, 8), dtype=F16, mask="none", head_size=24, images=3),
    Case((8, 8, 8), dtype=F16, head_size=32, images=1),
    Case((24, 24), dtype=BF16, head_size=32, images=3),
    Case((24, 24), dtype=F16, mask="many", **D16),
    Case((24, 24), dtype=F16, head_size=64, images=1),
    *(Case((16, 16), dtype=dtype, head_size=30, images=4) for dtype in (F16, BF16)),
    Case((7, 7, 7), dtype=F16, head_size=18, images=1),
    Case((12, 12), dtype=BF16, head_size=45, images=33),
    Case((16, 16), dtype=F16, mask="none", softmax_scale=0.01, head_size=30, images=4),
    Case((32, 32), dtype=F16, head_size=32, images=1),
    *(Case((12, 12), dtype=dtype, head_size=32, images=33) for dtype in (F16, BF16)),
    Case((5, 13), dtype=BF16, **D16 | {"images": 22}),
    Case((9, 9), dtype=F16, mask="none", head_size=32, images=32),
    Case((6, 16), dtype=F16, head_size=8, images=70),
    Case((10, 10), dtype=BF16, mask="many", head_size=24, images=32),
    *(Case((8, 16), dtype=dtype, head_size=64, images=32) for dtype in (F16, BF16)),
    Case((13, 13), dtype=F16, bias="one", head_size=64, images=32),
    *(Case((7, 7), dtype=dtype, num_heads=3, head_size=32, images=9) for dtype in (F16, BF16)),
    *(Case((8, 8), dtype=F16, head_size=size, images=300) for size in (8, 24, 48, 64)),
    Case((7, 7), dtype=F16, mask="none", **D16),
    Case((7, 7), dtype=F16, mask="many", **D16),
    Case((4, 4, 4), dtype=BF16, mask="many", mask_value=-math.inf, head_size=16),
    Case((7, 7), dtype=F16, mask_value=-3e4, softmax_scale=-1.5, **D16),
    Case((7, 7), dtype=BF16, bias="one", softmax_scale=0.01, **D16),
    Case((8, 8), dtype=F16, bias="none", num_tokens=33, softmax_scale=0.0, **D16),
    Case((6, 7), dtype=F16, bias="none", mask="none", **D16 | {"num_heads": 67}),
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", ON_HOPPER, ids=str)
def test_hopper_matches_float64(case):
    inputs = make(case, "hopper")
    with poisoned_memory():
        found = inputs.attend("hopper")
    # A score of float16 is rounded with its bias and after every 16 columns. Model code rounds as
    # often, but where the scale is small only its last rounding, after the bias is added, is large.
    is_mostly_bias = case.dtype == F16 and case.softmax_scale == 0.01
    assert_matches(inputs, found, times=3 if is_mostly_bias else 2)
    again = inputs.attend("hopper")
    assert all(torch.equal(found[name], again[name]) for name in found)


@pytest.mark.parametrize(
    ("impl", "window"),
    [
        pytest.param("triton", (3, 3), marks=pytest.mark.interpret),
        *(pytest.param("hopper", (n, n), marks=pytest.mark.gpu) for n in (7, 8, 12)),
    ],
)
def test_gradients_of_the_result_alone(impl, window):
    """As in training: the log-sum-exp has no gradient."""
    images = 32 if impl == "hopper" else 2  # fewer of 144 tokens are left to triton
    inputs = make(Case(window, dtype=F16, head_size=32, images=images), impl)
    inputs.dlse = None
    assert_matches(inputs, inputs.attend(impl))


@pytest.mark.gpu
@pytest.mark.parametrize("head_size", [18, 30, 45, 62])
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_rows_that_are_copied_give_the_bits_of_those_that_need_not_be(head_size, dtype):
    """Rows of a projection's result; its gradient is one number, expanded."""
    numbers = torch.randn(4, 256, 3, 6, head_size, dtype=dtype, device="cuda")
    padded = numbers.new_empty(*numbers.shape[:-1], 64)[..., :head_size]
    padded.copy_(numbers)
    results = []
    for packed in (numbers, padded):
        q, k, v = (x.detach().requires_grad_() for x in packed.permute(2, 0, 3, 1, 4))
        out = window_attention(q, k, v, impl="hopper").out
        out.sum().backward()
        results.append((out, q.grad, k.grad, v.grad))
    for found, expected in zip(*results, strict=True):
        assert found.isfinite().all()
        assert torch.equal(found, expected)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("score", "dlse", "is_finite"), [(44_000, 1.0, True), (1, 60_000.0, True), (1, 7e4, False)]
)
def test_float16_gradients_are_right_up_to_float16s_largest_pivot_and_delta(score, dlse, is_finite):
    """Hopper stores both in float16: up to 65 504, which is a score of 45 400 in base 2."""
    q, k, v = torch.randn(3, 4, 2, 256, 32, dtype=F16, device="cuda").unbind()
    for x in (q, k):
        x.fill_((score / 32) ** 0.5)
    found, wanted = (
        [x.detach().to(dtype).requires_grad_() for x in (q, k, v)] for dtype in (F16, F64)
    )
    for rows, impl in ((found, "hopper"), (wanted, "reference")):
        out, lse = window_attention(*rows, softmax_scale=1.0, impl=impl)
        torch.autograd.backward([out, lse], [torch.ones_like(out), torch.full_like(lse, dlse)])
    if not is_finite:
        assert not found[0].grad.isfinite().any()
        return
    for x, y in zip(found, wanted, strict=True):
        assert (x.grad - y.grad).abs().max() < 0.05 * y.grad.abs().max()


FAR_APART = {
    "all rows": lambda q, k: q.mul_(8),
    "a late key": lambda q, k: k[:, :, 200].mul_(20),
    "the first keys": lambda q, k: k[:, :, :64].mul_(20),
    "few windows": lambda q, k: q[2:4].mul_(20),
}


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [
        Case((7, 7, 7), dtype=F16, **D16 | {"images": 7}),
        Case((7, 7, 7), dtype=F16, mask="none", **D16),
        Case((7, 7, 7), dtype=BF16, **D16),
        Case((24, 24), dtype=F16, head_size=32, images=3),
    ],
    ids=str,
)
@pytest.mark.parametrize("which", FAR_APART)
def test_hopper_retries_windows_whose_pivot_guess_fails(case, which):
    inputs = make(case, "hopper")
    FAR_APART[which](inputs.tensors["q"], inputs.tensors["k"])
    assert_matches(inputs, inputs.attend("hopper"))


@pytest.mark.gpu
@pytest.mark.parametrize("mask", ["none", "regions"])
def test_hopper_retries_some_of_many_windows(mask, monkeypatch):
    """A stream has more windows than a word has bits, so some share a bit and are retried too."""
    from pagetile.ops.window_attention import hopper

    def in_one_chunk(*question):
        plan, launcher = plan_forward(*question)
        return replace(plan, chunks=1), launcher

    plan_forward = hopper.plan_forward
    monkeypatch.setattr(hopper, "plan_forward", in_one_chunk)
    case = Case((7, 7, 7), num_heads=1, head_size=16, dtype=F16, mask=mask, images=25)
    inputs = make(case, "hopper")
    inputs.tensors["q"][[3, 93, 94, 199]] *= 20
    assert_matches(inputs, inputs.attend("hopper"))


ON_A_CPU = [
    Case((7, 7, 7), images=1),
    Case((12, 12), cosine=True),
    Case((7, 7, 7), images=1, dtype=BF16),
    Case((9, 13), head_size=39, dtype=BF16, mask="float"),
]


@pytest.mark.parametrize("case", ON_A_CPU, ids=str)
def test_the_cpu_matches_float64_at_full_size(case):
    inputs = make(case, "cpu")
    assert_matches(inputs, inputs.attend("cpu"))


def test_a_wrong_result_is_refused():
    inputs = Inputs(Case())
    found = inputs.attend("reference")
    for name in found:
        wrong = {**found, name: found[name].clone()}
        wrong[name][(0,) * wrong[name].dim()] += 0.01
        with pytest.raises(AssertionError, match=f"^{name} of"):
            assert_matches(inputs, wrong)


# --- the gradient is the function's ------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [
        Case((2, 3), head_size=3, mask_value=-2.0, images=1),
        Case((2, 2), head_size=3, cosine=True, mask_value=-2.0, images=1),
        Case((2, 2), head_size=3, bias="dense", mask="bool", mask_value=-2.0, images=1),
    ],
    ids=str,
)
def test_gradcheck_in_float64(case):
    inputs = Inputs(case)
    leaves = inputs.leaves(F64)

    def attend(*tensors):
        return tuple(window_attention(**dict(zip(leaves, tensors, strict=True)), **inputs.options))

    assert torch.autograd.gradcheck(attend, tuple(leaves.values()))


@pytest.mark.parametrize("case", [Case((7, 7), dtype=F16), Case((5, 4, 4), cosine=True)], ids=str)
def test_two_runs_give_the_same_bits(case, impl):
    if impl == "triton" and not ON_GPU:
        pytest.skip("the interpreter knows one order only")
    inputs = make(case, impl)
    first, second = inputs.attend(impl), inputs.attend(impl)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_saved_tensors_may_come_back_in_another_layout(impl):
    """Hooks that offload them, ``save_on_cpu`` for one, do not keep strides."""
    inputs = make(Case((9, 8), dtype=F16, images=1), impl)
    wanted = inputs.attend(impl)

    def pack(tensor):
        return tensor.detach().clone(memory_format=torch.contiguous_format)

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        found = inputs.attend(impl)
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)


def test_saved_tensors_may_come_back_at_any_address(monkeypatch):
    """GPU kernels load 16 bytes of the output at a time, so that a misaligned one is a fault."""
    starts, backward = [], reference.backward

    def record(problem, x, out, *rest):
        starts.append(out.data_ptr() % 16)
        return backward(problem, x, out, *rest)

    def shift(tensor):
        memory = tensor.new_empty(2 * tensor.untyped_storage().nbytes() // tensor.element_size())
        return memory.as_strided(tensor.shape, tensor.stride(), 1).copy_(tensor)

    monkeypatch.setattr(reference, "backward", record)
    inputs = make(Case((3, 3), images=1), "reference")
    wanted = inputs.attend("reference")
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.detach(), shift):
        found = inputs.attend("reference")
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)
    assert starts == [0, 0]


HIDDEN = [
    pytest.param("reference", (4, 4), 8),
    pytest.param("triton", (4, 4), 8, marks=pytest.mark.interpret),
    *(pytest.param("hopper", (n, n), 24, marks=pytest.mark.gpu) for n in (7, 14)),
]


@pytest.mark.parametrize(("impl", "window", "size"), HIDDEN)
def test_a_bias_of_minus_infinity_hides_keys(impl, window, size):
    inputs = make(Case(window, dtype=F16, head_size=size, bias="dense", mask="none"), impl)
    bias = inputs.tensors["bias"] = inputs.tensors["bias"][:1].clone()
    bias[:, :, 3] = -math.inf  # a row that sees nothing
    bias[:, :, 5, 7] = -math.inf
    tensors = {**inputs.tensors, "bias": bias}
    found = window_attention(**tensors, impl=impl)
    assert (found.out[:, :, 3] == 0).all()
    assert (found.lse[:, :, 3] == -math.inf).all()
    wanted = window_attention(**{name: x.double() for name, x in tensors.items()}, impl="reference")
    assert torch.allclose(found.out.double(), wanted.out, atol=1e-2)
    bias[:, :, 4, 2] = math.nan
    found = window_attention(**tensors, impl=impl)
    assert found.out[:, :, 4].isnan().all()
    assert not found.out[:, :, 5].isnan().any()


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_the_number_of_threads_does_not_show_on_a_cpu(dtype):
    inputs, before = Inputs(Case((7, 7), images=3, dtype=dtype)), torch.get_num_threads()
    results = []
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        results.append(inputs.attend("cpu"))
    torch.set_num_threads(before)
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_only_one_result_may_be_used(impl):
    inputs = make(Case(), impl)
    for name in ("out", "lse"):
        leaves = inputs.leaves()
        result = window_attention(**leaves, **inputs.options, impl=impl)
        wide = inputs.leaves(F64)
        expected = window_attention(**wide, **inputs.options, impl="reference")
        found = torch.autograd.grad(getattr(result, name).sum(), leaves["q"])[0]
        wanted = torch.autograd.grad(getattr(expected, name).sum(), wide["q"])[0]
        assert (found - wanted).abs().max() < 1e-5


# --- corners ----------------------------------------------------------------------------------


def test_a_row_that_sees_nothing_is_zero():
    q = torch.randn(1, 1, 3, 8, requires_grad=True)
    mask = torch.zeros(1, 3, 3).index_fill(1, torch.tensor([1]), -math.inf)
    result = window_attention(q, q, q, mask=mask)
    assert result.lse[0, 0, 1] == -math.inf
    assert (result.out[0, 0, 1] == 0).all()
    (gradient,) = torch.autograd.grad(result.out.sum(), q)
    assert gradient.isfinite().all()


def test_tokens_of_zeros_are_normalised_to_zeros_in_half_precision(impl):
    """Half-precision model code gives NaN: its epsilon rounds to 0, and padded tokens are zeros."""
    inputs = make(Case((4, 4), cosine=True, num_heads=3, dtype=F16), impl)
    for name in "qk":
        inputs.tensors[name][:, :, 5:9] = 0
    found, expected = inputs.attend(impl), inputs.attend("reference", F64)
    for name in ("out", "lse", "v", "bias_table", "logit_scale"):
        assert (found[name] - expected[name]).abs().max() < 0.02 * expected[name].abs().max()
    kept = [n for n in range(16) if not 5 <= n < 9]
    for name in "qk":
        difference = (found[name] - expected[name])[:, :, kept].abs().max()
        assert difference < 0.02 * expected[name][:, :, kept].abs().max()


def test_more_windows_than_a_grid_has_rows(impl):
    device = "cuda" if impl == "triton" and ON_GPU else "cpu"
    if impl == "triton" and not ON_GPU:
        pytest.skip("minutes under the interpreter")
    q, k, v = torch.randn(3, 65_537, 1, 4, 4, device=device).unbind(0)
    found = window_attention(q, k, v, impl=impl)
    expected = torch.nn.functional.scaled_dot_product_attention(q[-3:], k[-3:], v[-3:])
    assert (found.out[-3:] - expected).abs().max() < 1e-5


def test_no_windows(impl):
    if impl == "triton" and not ON_GPU:
        pytest.skip("the interpreter cannot hold an empty tensor")
    q = torch.empty(0, 2, 9, 8, device="cuda" if impl == "triton" else "cpu", requires_grad=True)
    result = window_attention(q, q, q, impl=impl)
    assert result.out.shape == q.shape
    assert torch.autograd.grad(result.out.sum(), q)[0].shape == q.shape


def test_heads_of_a_token_lie_side_by_side(impl):
    inputs = make(Case(), impl)
    out = window_attention(**inputs.tensors, **inputs.options, impl=impl).out
    assert out.transpose(1, 2).is_contiguous()


# --- as torch sees it -------------------------------------------------------------------------


def call(case):
    inputs = Inputs(case)
    x = {**inputs.tensors, **inputs.options}
    names = ("q", "k", "v", "bias_table", "rel_offsets", "bias", "regions", "mask", "logit_scale")
    tensors = tuple(x.get(name) for name in names)
    for tensor in filter(torch.is_tensor, (*tensors[:4], tensors[5])):
        tensor.requires_grad_()
    return *tensors, case.mask_value, 0.3, 1e-12, "auto"


@pytest.mark.parametrize("case", [Case(), Case(cosine=True, dtype=F16)], ids=str)
def test_the_operator_is_one_that_torch_can_trace(case):
    operator = torch.ops.pagetile.window_attention.default
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(operator, call(case), test_utils=checks)


@pytest.mark.parametrize(
    "case", [Case(), Case(cosine=True), Case(num_heads=3, dtype=BF16), Case(bias="dense")], ids=str
)
def test_results_lie_as_a_compiler_expects(case):
    """A compiler relies on the strides of the fake implementation."""
    inputs = call(case)
    forward = torch.ops.pagetile.window_attention
    backward = torch.ops.pagetile.window_attention_backward
    results = forward(*inputs)
    found = *results, *backward(*inputs, *results, torch.randn_like(results[0]), None)
    with FakeTensorMode() as mode:
        inputs = [mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in inputs]
        results = forward(*inputs)
        expected = *results, *backward(*inputs, *results, torch.empty_like(results[0]), None)
    for real, fake in zip(found, expected, strict=True):
        assert (real.shape, real.stride(), real.dtype) == (fake.shape, fake.stride(), fake.dtype)


def test_gradients_may_come_in_batches():
    q, k, v = (torch.randn(4, 2, 9, 8, requires_grad=True) for _ in range(3))
    table, offsets = torch.randn(25, 2, requires_grad=True), rel_offsets((3, 3))

    def run(q, table):
        return window_attention(q, k, v, bias_table=table, rel_offsets=offsets).out

    out, dout = run(q, table), torch.randn(3, 4, 2, 9, 8)
    qs = torch.randn(3, 4, 2, 9, 8)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="There is a performance drop")
        found = torch.autograd.grad(out, (q, table), dout, is_grads_batched=True, retain_graph=True)
        each = torch.func.vmap(torch.func.grad(lambda q: run(q, table).sin().sum()))(qs)
    alone = [torch.autograd.grad(out, (q, table), one, retain_graph=True) for one in dout]
    for batched, expected in zip(found, zip(*alone, strict=True), strict=True):
        torch.testing.assert_close(batched, torch.stack(expected))
    for one, dq in zip(qs.requires_grad_(), each, strict=True):
        torch.testing.assert_close(dq, torch.autograd.grad(run(one, table).sin().sum(), one)[0])


def test_a_second_derivative_is_refused():
    q = torch.randn(4, 2, 9, 8, requires_grad=True)
    [dq] = torch.autograd.grad(window_attention(q, q, q).out.sum(), q, create_graph=True)
    with pytest.raises(UnsupportedError, match="differentiate once"):
        dq.sum().backward()


def test_torch_compile_makes_one_graph():
    inputs = Inputs(Case())
    compiled = torch.compile(window_attention, fullgraph=True, backend="aot_eager")
    found = inputs.attend("auto", attend=compiled)
    expected = inputs.attend("auto")
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_checkpointing_runs_it_twice():
    inputs = Inputs(Case())
    leaves = inputs.leaves()
    result = torch.utils.checkpoint.checkpoint(
        lambda q: window_attention(**{**leaves, "q": q}, **inputs.options).out,
        leaves["q"],
        use_reentrant=False,
    )
    result.backward(inputs.dout)
    plain = inputs.leaves()
    window_attention(**plain, **inputs.options).out.backward(inputs.dout)
    assert all(torch.equal(leaves[name].grad, plain[name].grad) for name in leaves)


def test_under_autocast_rows_are_cast_and_the_table_is_not():
    inputs = Inputs(Case())
    leaves = inputs.leaves()
    with torch.autocast("cpu", torch.bfloat16):
        result = window_attention(**leaves, **inputs.options)
    assert result.out.dtype == BF16
    result.out.float().sum().backward()
    assert leaves["q"].grad.dtype == leaves["bias_table"].grad.dtype == F32


def test_between_forward_and_backward_only_the_lse_is_new():
    inputs = Inputs(Case((7, 7)))
    leaves = inputs.leaves()
    result = window_attention(**leaves, **inputs.options)
    given = [*leaves.values(), inputs.options["rel_offsets"], inputs.options["regions"]]
    own = {tensor.untyped_storage().data_ptr() for tensor in given}
    kept = [tensor for tensor in result.out.grad_fn.saved_tensors if tensor is not None]
    new = [tensor for tensor in kept if tensor.untyped_storage().data_ptr() not in own]
    assert {tuple(tensor.shape) for tensor in new} == {
        tuple(result.out.shape), tuple(result.lse.shape)
    }  # fmt: skip


@pytest.mark.parametrize("dtype", [F32, BF16, torch.float16])
def test_a_cpu_needs_little_memory_beside_the_result(dtype):
    grid, window = (32, 32), (16, 16)
    regions, offsets = shift_regions(grid, window, (8, 8)), rel_offsets(window)
    q, k, v = torch.randn(4, 256, 3, 2, 16).to(dtype).permute(2, 0, 3, 1, 4).unbind()
    inputs = {"bias_table": table_of(31 * 31), "rel_offsets": offsets, "regions": regions}
    window_attention(q, k, v, **inputs)
    with torch.profiler.profile(profile_memory=True) as profile:
        result = window_attention(q, k, v, **inputs)
    taken = sum(max(0, event.self_cpu_memory_usage) for event in profile.events())
    scores = 4 * 2 * 256 * 256 * 4
    extra = taken - result.out.nbytes - result.lse.nbytes
    assert 0 <= extra <= 0.05 * scores, f"{extra} bytes beside {scores} of scores"


@pytest.mark.parametrize(
    ("window", "chosen"),
    [
        ((5,), slice(None, None, 2)),
        ((7, 7), [0, 2, 14, 16]),  # every other one
        ((4, 4), [0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15]),  # by quarters
        ((3, 3), [0, 4]),
        ((3, 3), [8, 7, 6, 5, 4, 3, 2, 1, 0]),
        ((4, 4), [0, 2, 4, 6, 8, 10, 12, 14]),
    ],
)
def test_tokens_may_be_any_in_any_order(window, chosen):
    offsets = rel_offsets(window)[chosen]
    q = torch.randn(2, 1, len(offsets), 8)
    table = torch.randn(math.prod(2 * n - 1 for n in window), 1)
    options = {"bias_table": table, "rel_offsets": offsets}
    expected = window_attention(q, q, q, **options, impl="reference").out
    torch.testing.assert_close(window_attention(q, q, q, **options).out, expected)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_gradients_of_a_row_with_an_infinite_score_are_nan(dtype):
    """Its weights of all keys are unknown, and so are the gradients of the keys."""
    q, k, v = torch.ones(3, 2, 1, 9, 16, dtype=dtype).unbind()
    k[0, 0, 3, 5] = math.inf
    rows = [x.clone().requires_grad_() for x in (q, k, v)]
    out = window_attention(*rows, impl="cpu").out
    for gradient in torch.autograd.grad(out[:, :, :, 0].sum(), rows):
        assert gradient[0].isnan().all()
        assert gradient[1].isfinite().all()


@pytest.mark.parametrize("kind", ["regions", "mask"])
def test_the_least_float_masks_without_a_warning(kind):
    """Scores are multiplied by log2(e), which it would not survive as a float32 number."""
    rows = torch.randn(2, 1, 9, 16)
    masks = {"regions": torch.arange(9).expand(2, 9) // 2, "mask": torch.rand(2, 9, 9) < 0.5}
    masks["mask"][:, :, 4] = True
    options = {kind: masks[kind], "mask_value": torch.finfo(F32).min}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = window_attention(rows, rows, rows, **options, impl="cpu")
    wanted = window_attention(rows, rows, rows, **options, impl="reference")
    torch.testing.assert_close(found.out, wanted.out)


def _attend_by_formula(q, k, v, mask):
    """SDPA's fused GPU kernels return 0 for rows of such masks, and n times their gradients."""
    return (q @ k.mT * q.shape[-1] ** -0.5 + mask).softmax(-1) @ v


@pytest.mark.filterwarnings("ignore:overflow encountered in multiply")  # NumPy's, interpreting
@pytest.mark.parametrize("kind", ["mask", "bool", "bias"])
@pytest.mark.parametrize(("value", "is_hidden"), [(torch.finfo(F32).min, True), (-1e30, False)])
def test_a_row_of_finite_masks_is_a_mean_unless_base_2_cannot_hold_them(
    kind, impl, value, is_hidden
):
    """The kernels gave 0 and the reference the sum of the values."""
    q, k, v = torch.randn(3, 2, 2, 6, 16, device="cuda" if ON_GPU else "cpu").unbind()
    mask = q.new_zeros(1, 6, 6).index_fill(1, torch.tensor([2], device=q.device), value)
    options = {
        "mask": {"mask": mask},
        "bool": {"mask": mask == 0, "mask_value": value},
        "bias": {"bias": mask.expand(2, 6, 6)},
    }
    out, lse = window_attention(q, k, v, **options[kind], impl=impl)
    wanted = _attend_by_formula(q, k, v, mask)
    assert torch.allclose(wanted[:, :, 2], v.mean(2), atol=1e-5)
    if is_hidden:
        wanted[:, :, 2] = 0
        assert (lse[:, :, 2] == -math.inf).all()
    torch.testing.assert_close(out, wanted)


@pytest.mark.filterwarnings("ignore:overflow encountered in multiply")  # NumPy's, interpreting
@pytest.mark.parametrize("kind", ["mask", "bias"])
@pytest.mark.parametrize("value", [-1.2345e9, -1e30])
@pytest.mark.parametrize("num_tokens", [40, 100])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_gradients_are_right_in_a_row_of_finite_masks(dtype, num_tokens, value, kind, impl):
    """Next to such scores the log-sum-exp has lost the logarithm of the sum: they were n times."""
    if impl == "triton" and dtype == BF16 and not ON_GPU:
        pytest.skip("Triton 3.6's interpreter does not round to bfloat16 as a GPU does")
    device = "cuda" if impl == "triton" and ON_GPU else "cpu"
    q, k, v, dout = torch.randn(4, 2, 2, num_tokens, 16, device=device).to(dtype).unbind()
    q[:, :, 2] = 0  # the mean of the values, whether or not the sums of scores and mask are equal
    mask = torch.zeros(1, num_tokens, num_tokens, device=device)
    mask[:, 2] = value
    options = {"mask": mask} if kind == "mask" else {"bias": mask.expand(2, -1, -1)}
    rows, wide = ([x.to(t).requires_grad_() for x in (q, k, v)] for t in (dtype, F32))
    out = window_attention(*rows, **options, impl=impl).out
    wanted = _attend_by_formula(*wide, mask)
    for found, other in zip(
        (out, *torch.autograd.grad(out, rows, dout)),
        (wanted, *torch.autograd.grad(wanted, wide, dout.float())),
        strict=True,
    ):
        limit = 1e-4 if dtype == F32 else 0.02
        assert (found - other).abs().max() <= limit * other.abs().max()


@pytest.mark.interpret
@pytest.mark.filterwarnings("ignore:overflow encountered in multiply")  # NumPy's, interpreting
@pytest.mark.parametrize("num_tokens", [9, 100])
@pytest.mark.parametrize(("value", "is_hidden"), [(-1e9, False), (-65504, False), (-3e38, True)])
def test_a_finite_mask_stays_finite_in_the_float16_bias_that_triton_keeps(
    value, is_hidden, num_tokens
):
    """It was -inf there, and a row masked throughout was 0."""
    device = "cuda" if ON_GPU else "cpu"
    q, k, v = torch.randn(3, 2, 1, num_tokens, 16, dtype=F16, device=device).unbind()
    q[:, :, 2] = 0
    bias = q.new_zeros(1, num_tokens, num_tokens, dtype=F32)
    bias[:, 2] = value
    bias[:, 3, 1:] = value
    out = window_attention(q, k, v, bias=bias, impl="triton").out
    wanted = torch.zeros_like(v[:, :, 2]) if is_hidden else v.float().mean(2).to(F16)
    torch.testing.assert_close(out[:, :, 2], wanted, atol=2e-3, rtol=0)
    torch.testing.assert_close(out[:, :, 3], v[:, :, 0], atol=2e-3, rtol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [49, 256])
@pytest.mark.parametrize("scale", [0.25, 1.0, 4.0])
@pytest.mark.parametrize(("value", "is_hidden"), [(torch.finfo(F32).min, True), (-1e30, False)])
def test_hopper_hides_keys_by_the_least_float_at_any_scale(value, is_hidden, scale, num_tokens):
    """It was divided by the scale and, from 1 on, taken for a finite mask."""
    q, k, v = torch.randn(3, 128, 2, num_tokens, 32, dtype=BF16, device="cuda").unbind()
    q[:, :, 2] = 0
    bias = torch.zeros(2, num_tokens, num_tokens, device="cuda")
    bias[:, 2] = value
    out, lse = window_attention(q, k, v, bias=bias, softmax_scale=scale, impl="hopper")
    wanted = torch.zeros_like(v[:, :, 2]) if is_hidden else v.float().mean(2).to(BF16)
    torch.testing.assert_close(out[:, :, 2], wanted, atol=0.02, rtol=0)
    assert bool((lse[:, :, 2] == -math.inf).all()) == is_hidden


@pytest.mark.parametrize("bits", [0x7FC00000, 0xFFFFFFFF, 0x7FC00001])
def test_a_nan_shows_in_results_and_log_sum_exps(bits):
    q, k, v = torch.randn(3, 2, 1, 9, 16).unbind()
    k.view(torch.int32)[0, 0, 3, 5] = bits - (1 << 32) if bits >> 31 else bits
    found = window_attention(q, k, v)
    assert found.out[0].isnan().all()
    assert found.lse[0].isnan().all()
    assert found.out[1].isfinite().all()


# --- what cannot be ---------------------------------------------------------------------------


def table_of(rows, heads=2):
    return torch.zeros(rows, heads)


SHAPE, DTYPE = ShapeError, DTypeError
WRONG = {
    "token counts": ({"k": torch.zeros(8, 2, 10, 8)}, SHAPE, "k has num_tokens=10 but q has 9"),
    "head counts": ({"bias_table": table_of(25, 3)}, SHAPE, "bias_table has num_heads=3 but q has"),
    "even table": ({"bias_table": table_of(24)}, SHAPE, "bias_table has 24 rows.*num_tokens=9"),
    "short table": ({"bias_table": table_of(15)}, SHAPE, "bias_table has 15 rows.*at least 17"),
    "small table": ({"bias_table": table_of(23)}, SHAPE, "bias_table has 23 rows.*needs 25"),
    "large table": ({"bias_table": table_of(27)}, SHAPE, "27 rows.*step by 5.*another window"),
    "twice": ({"rel_offsets": torch.zeros(9, dtype=torch.int32)}, SHAPE, "rel_offsets.*twice"),
    "other offsets": ({"rel_offsets": rel_offsets((2, 2))}, SHAPE, "rel_offsets has num_tokens=4"),
    "no offsets": ({"rel_offsets": None}, SHAPE, "bias_table is given without rel_offsets"),
    "no table": ({"bias_table": None}, SHAPE, "rel_offsets is given without bias_table"),
    "two biases": ({"bias": torch.zeros(2, 9, 9)}, SHAPE, "both bias_table and bias"),
    "two masks": ({"mask": torch.zeros(4, 9, 9)}, SHAPE, "both regions and mask"),
    "regions' windows": (
        {"regions": torch.zeros(3, 9, dtype=torch.uint8)},
        SHAPE,
        "regions is for 3 windows but q has num_windows=8",
    ),
    "mask's windows": (
        {"regions": None, "mask": torch.zeros(5, 9, 9)},
        SHAPE,
        "mask is for 5 windows but q has num_windows=8",
    ),
    "mask's tokens": (
        {"regions": None, "mask": torch.zeros(4, 9, 8)},
        SHAPE,
        "mask has num_tokens=8 but",
    ),
    "types": ({"v": torch.zeros(8, 2, 9, 8, dtype=F16)}, DTYPE, "v is float16, expected float32"),
    "offset type": ({"rel_offsets": rel_offsets((3, 3)).long()}, DTYPE, "rel_offsets is int64"),
    "region type": ({"regions": torch.zeros(4, 9)}, DTYPE, "regions is float32"),
    "strides": ({"q": torch.zeros(8, 2, 8, 9).transpose(2, 3)}, SHAPE, "q has stride"),
    "a name": ({"impl": "cuda"}, UnsupportedError, "impl is 'cuda'"),
    "no value": ({"mask_value": None}, DTYPE, "mask_value is None, expected a number"),
    "a word": ({"softmax_scale": "a"}, DTYPE, "softmax_scale is 'a', expected a number"),
    "scales": ({"softmax_scale": torch.ones(2)}, DTYPE, r"softmax_scale is a tensor \[2\]"),
    "no eps": ({"qk_norm_eps": 0.0}, SHAPE, "qk_norm_eps is 0.0, expected a finite number more"),
    "less than none": ({"qk_norm_eps": -1.0}, SHAPE, "qk_norm_eps is -1.0, expected"),
    "nan scale": ({"softmax_scale": math.nan}, SHAPE, "softmax_scale is nan, expected a finite"),
    "infinite scale": ({"softmax_scale": math.inf}, SHAPE, "softmax_scale is inf, expected"),
    "nan mask": ({"mask_value": math.nan}, SHAPE, "mask_value is nan, expected a number"),
    "a list": ({"impl": ["cpu"]}, DTYPE, r"impl is \['cpu'\], expected a string"),
    "flat bias": (
        {"bias_table": None, "rel_offsets": None, "bias": torch.zeros(9, 9)},
        SHAPE,
        r"bias has 2 dimensions \[9, 9\], expected 3 or 4",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_errors_name_the_argument_and_both_sizes(what):
    changes, error, message = WRONG[what]
    inputs = Inputs(Case())
    arguments = {**inputs.tensors, **inputs.options, **changes}
    with pytest.raises(error, match=message):
        window_attention(**arguments)


def test_a_named_implementation_says_why_it_cannot():
    q = torch.zeros(2, 2, 9, 8, dtype=F64)
    with pytest.raises(UnsupportedError, match="cpu cannot run this: q is float64"):
        window_attention(q, q, q, impl="cpu")
    with pytest.raises(UnsupportedError, match="biases of 2 windows are left to the reference"):
        window_attention(*[q.float()] * 3, bias=torch.zeros(2, 2, 9, 9), impl="cpu")


def test_explain_lists_what_could_run():
    q = torch.zeros(2, 2, 9, 8)
    text = explain_window_attention(q, q, q, bias=torch.zeros(2, 2, 9, 9))
    assert text.splitlines()[0] == "cpu: no, biases of 2 windows are left to the reference"
    assert text.splitlines()[-1] == "reference: yes"


def test_every_option_has_an_effect():
    """Each changes the result, so none is silently dropped."""
    plain = Inputs(Case(cosine=True))
    base = plain.attend("reference")["out"]
    inputs = {**plain.tensors, **plain.options}
    changes = itertools.chain(
        ({name: inputs[name] + 1} for name in ("logit_scale",)),
        [{"regions": None}, {"mask_value": -1.0}, {"softmax_scale": 0.5}, {"qk_norm_eps": 10.0}],
        [{"bias_table": None, "rel_offsets": None}],
    )
    for change in changes:
        changed = window_attention(**{**inputs, **change}, impl="reference").out
        assert (changed - base).abs().max() > 1e-3, change


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_may_overlap_in_memory(dtype):
    """For such tensors torch's conversion to float32 reorders dimensions."""
    memory = torch.randn(3, 2, 40).to(dtype)
    rows = memory.unfold(2, 32, 1)  # a token begins one number after the one before it
    found = window_attention(rows, rows, rows, impl="cpu").out
    torch.testing.assert_close(found, window_attention(*[rows.contiguous()] * 3, impl="cpu").out)
