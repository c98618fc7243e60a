"""``attention`` against float64, forward and backward, on every implementation that runs here."""

import itertools
import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from pagetile import AttentionOutput, BlockMask, UnsupportedError, attention, explain_attention
from pagetile.ops.attention import reference
from pagetile.testing import poisoned_memory
from pagetile.tiles.eager import attend

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
ON_GPU = torch.cuda.is_available()
GRADIENTS = ("q", "k", "v")


@dataclass(frozen=True)
class Case:
    """A batch: ragged, or dense with ``batch`` sequences of the first lengths."""

    query_lens: tuple[int, ...] = (5,)
    seq_lens: tuple[int, ...] = (7,)
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 16
    v_head_size: int | None = None
    dtype: torch.dtype = F32
    batch: int = 0
    causal: bool = False
    softmax_scale: float | None = None
    sliding_window: int | None = None
    logits_soft_cap: float | None = None
    has_alibi: bool = False
    has_sinks: bool = False
    blocks: tuple[int, int] | None = None  # of a block mask
    mask_per: str = "both"  # batch, head, both or neither
    density: float = 0.4

    def __str__(self):
        kind = f"b{self.batch}" if self.batch else "ragged"
        lens = f"{max(self.query_lens, default=0)}x{max(self.seq_lens, default=0)}"
        heads = f"h{self.num_heads}/{self.num_kv_heads}"
        words = [kind, lens, heads, f"d{self.head_size}", str(self.dtype).removeprefix("torch.")]
        words += ["v" + str(self.v_head_size)] * (self.v_head_size is not None)
        words += ["causal"] * self.causal + [f"w{self.sliding_window}"] * bool(self.sliding_window)
        words += ["cap"] * bool(self.logits_soft_cap) + ["alibi"] * self.has_alibi
        words += ["sinks"] * self.has_sinks
        if self.blocks:
            words.append(f"blocks{self.blocks[0]}x{self.blocks[1]}-{self.mask_per}")
        return "-".join(words)


class Inputs:
    """A case's tensors: strided, with NaN between its rows."""

    def __init__(self, case, device="cpu"):
        self.case, self.device = case, device
        self.random = torch.Generator().manual_seed(len(str(case)) + sum(case.seq_lens))
        rows, keys = self.shape(case.query_lens), self.shape(case.seq_lens)
        v_size = case.v_head_size or case.head_size
        self.q = self.tensor(*rows, case.num_heads, case.head_size)
        self.k = self.tensor(*keys, case.num_kv_heads, case.head_size)
        self.v = self.tensor(*keys, case.num_kv_heads, v_size)
        self.d_out = self.tensor(*rows, case.num_heads, v_size)
        self.d_lse = self.normal(*rows, case.num_heads).to(device)
        self.options = {"causal": case.causal, "softmax_scale": case.softmax_scale}
        self.options |= {"sliding_window": case.sliding_window}
        self.options |= {"logits_soft_cap": case.logits_soft_cap}
        slopes, sinks = self.normal(case.num_heads) / 4, self.normal(case.num_heads)
        self.options |= {"alibi_slopes": slopes.to(device) if case.has_alibi else None}
        self.options |= {"sinks": sinks.to(device) if case.has_sinks else None}
        self.options |= {"block_mask": self.block_mask() if case.blocks else None}
        self.lengths = {}
        if not case.batch:
            self.lengths = {
                "cu_seqlens_q": starts(case.query_lens).to(device),
                "cu_seqlens_k": starts(case.seq_lens).to(device),
                "max_query_len": max(case.query_lens, default=0),
                "max_seq_len": max(case.seq_lens, default=0),
            }

    def block_mask(self):
        """A random mask; the first block of rows attends to nothing."""
        case = self.case
        per_batch, per_head = case.mask_per in ("batch", "both"), case.mask_per in ("head", "both")
        sizes = (case.query_lens[0], case.seq_lens[0])
        shape = [-(-n // block) for n, block in zip(sizes, case.blocks, strict=True)]
        shape = [case.batch if per_batch else 1, case.num_heads if per_head else 1, *shape]
        mask = torch.rand(shape, generator=self.random) < case.density
        mask[..., :1, :] = False
        return BlockMask(mask.to(self.device), *case.blocks)

    def shape(self, lens):
        return (self.case.batch, lens[0]) if self.case.batch else (sum(lens),)

    def normal(self, *shape):
        return torch.randn(shape, generator=self.random)

    def tensor(self, *shape):
        """Every other row of a larger tensor of NaN, with heads before rows in memory."""
        *outer, heads, size = shape
        buffer = torch.full((heads + 1, *outer, size + 8), math.nan, dtype=self.case.dtype)
        view = buffer[1:, ..., :size].movedim(0, -2)
        view.copy_(self.normal(*shape))
        moved = buffer.to(self.device)
        return moved[1:, ..., :size].movedim(0, -2)

    def sequences(self):
        if self.case.batch:
            return [(i, i) for i in range(self.case.batch)]
        bounds = starts(self.case.query_lens).tolist(), starts(self.case.seq_lens).tolist()
        cut = [[slice(*pair) for pair in itertools.pairwise(b)] for b in bounds]
        return list(zip(*cut, strict=True))

    def run(self, impl, dtype=None):
        """``out``, ``lse`` and the gradients of q, k, v and the sinks."""
        leaves = [t.detach().to(dtype or t.dtype) for t in (self.q, self.k, self.v)]
        if dtype is None:  # as they lie, with NaN between
            leaves = [self.q.detach(), self.k.detach(), self.v.detach()]
        sinks = self.options["sinks"]
        options = {**self.options, "sinks": sinks if sinks is None else sinks.clone()}
        wanted = [t.requires_grad_() for t in (*leaves, options["sinks"]) if t is not None]
        result = attention(*leaves, **self.lengths, **options, impl=impl)
        d_out = self.d_out if dtype is None else self.d_out.to(dtype)
        grads = torch.autograd.grad(result, wanted, (d_out, self.d_lse))
        return result, grads


def starts(lens):
    return torch.tensor([0, *itertools.accumulate(lens)], dtype=torch.int32)


@dataclass
class Expected:
    tensors: dict
    allowed: dict


def expect(inputs):
    """Results in float64, and their tolerance: twice eager torch's error, plus the effect of
    rounding on these sums. ``lse`` is float32 throughout."""
    case = inputs.case
    result, grads = inputs.run("reference", F64)
    exact = dict(zip(("out", "lse", *GRADIENTS, "sinks"), (*result, *grads), strict=False))
    eager = {name: torch.zeros_like(tensor) for name, tensor in exact.items()}
    spread, scores = dict.fromkeys(exact, 0.0), 1.0
    for rows, keys in inputs.sequences():
        parts = run_eager(inputs, rows, keys, case.dtype)
        parts |= {"lse": run_eager(inputs, rows, keys, F32)["lse"]}
        for name, part in parts.items():
            where = ... if name == "sinks" else keys if name in "kv" else rows
            eager[name][where] += part.to(eager[name].dtype)
        sizes = rounding_effects(inputs, rows, keys)
        scores = max(scores, sizes.pop("scores", 0.0))
        spread |= {name: max(spread[name], sizes[name]) for name in sizes if name in spread}
    u, u32 = torch.finfo(case.dtype).eps / 2, torch.finfo(F32).eps / 2
    allowed = {}
    for name, tensor in exact.items():
        largest = max(tensor[tensor.isfinite()].abs().tolist(), default=0.0)
        error = max(differences(eager[name], tensor).flatten().tolist(), default=0.0)
        own = u32 if name == "lse" else u
        allowed[name] = 2 * error + 2 * own * (largest + spread[name])
        allowed[name] += 8 * u32 * (1 + scores) * (spread[name] if name != "lse" else 1.0)
    return Expected(exact, allowed)


def run_eager(inputs, rows, keys, dtype):
    """One sequence as model code writes it, every step rounded to ``dtype``, by autograd."""
    places = zip("qkv", (rows, keys, keys), strict=True)
    leaves = {name: getattr(inputs, name)[where].detach().to(dtype) for name, where in places}
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in leaves.items()}
    options = options_of(inputs, rows)
    if options["sinks"] is not None:
        leaves["sinks"] = options["sinks"] = options["sinks"].clone().requires_grad_()
    out, lse = attend(*(leaves[name] for name in "qkv"), **options)
    d_out, d_lse = inputs.d_out[rows].to(out.dtype), inputs.d_lse[rows].to(lse.dtype)
    pairs = [(o, g) for o, g in ((out, d_out), (lse, d_lse)) if o.requires_grad]
    outs, given = zip(*pairs, strict=True)
    grads = torch.autograd.grad(outs, list(leaves.values()), given, allow_unused=True)
    parts = {"out": out.detach(), "lse": lse.detach()}
    for (name, leaf), grad in zip(leaves.items(), grads, strict=True):
        parts[name] = torch.zeros_like(leaf) if grad is None else grad.nan_to_num(0.0)
    return parts


def options_of(inputs, seq):
    """The options of one sequence, with the default scale filled in and its mask expanded."""
    options, case = dict(inputs.options), inputs.case
    if options["softmax_scale"] is None:
        options["softmax_scale"] = case.head_size**-0.5
    block_mask = options.pop("block_mask")
    if block_mask is not None:
        visible = block_mask.expand(case.query_lens[0], case.seq_lens[0])
        options["visible"] = visible[seq % len(visible)]
    return options


def rounding_effects(inputs, rows, keys):
    """How far each result moves when its terms have independent relative errors of 1."""
    case, options = inputs.case, options_of(inputs, rows)
    group = case.num_heads // case.num_kv_heads
    q, d_out = inputs.q[rows].double(), inputs.d_out[rows].double()
    k, v = (t[keys].double().repeat_interleave(group, 1) for t in (inputs.k, inputs.v))
    if not q.numel() or not k.numel():
        return {}
    scale = options["softmax_scale"]
    s = torch.einsum("qhd,khd->hqk", q, k) * scale
    sinks = options["sinks"]
    options |= {"sinks": sinks if sinks is None else sinks.double()}
    one_hot = torch.eye(len(k), dtype=F64, device=q.device)[:, None].expand(-1, q.shape[1], -1)
    p = attend(q, k, one_hot, **options)[0].movedim(1, 0)  # values that show the weights
    d_p = torch.einsum("qhd,khd->hqk", d_out, v)
    out = torch.einsum("hqk,khd->qhd", p, v)
    mean = (d_out * out).sum(-1).T[..., None]
    rounded = (d_out**2 * out**2).sum(-1).sqrt().T[..., None]
    d_s = p * ((d_p - mean + inputs.d_lse[rows].double().T[..., None]).abs() + rounded)

    def root(terms, a, b, fold=False):
        total = torch.einsum(terms, a**2, b**2)
        return (total.unflatten(1, (-1, group)).sum(2) if fold else total).max().sqrt().item()

    longest = q.norm(dim=-1).max() * k.norm(dim=-1).max() * abs(scale)
    tilt = (len(k) + len(q)) * (0.0 if not case.has_alibi else options["alibi_slopes"].abs().max())
    return {
        "scores": float(max(longest, s.abs().max()) + tilt),
        "out": root("hqk,khd->qhd", p, v),
        "v": root("hqk,qhd->khd", p, d_out, fold=True),
        "q": abs(scale) * root("hqk,khd->qhd", d_s, k),
        "k": abs(scale) * root("hqk,qhd->khd", d_s, q, fold=True),
        "sinks": (rounded**2).sum(1).max().sqrt().item() + (mean**2).sum(1).max().sqrt().item(),
    }


def differences(result, expected):
    """Absolute differences in float64; infinite where only one side is -inf, or either is NaN."""
    assert result.shape == expected.shape
    result, expected = result.double().cpu(), expected.double().cpu()
    errors = torch.where(result == expected, 0.0, (result - expected).abs())
    return errors.nan_to_num(nan=math.inf, posinf=math.inf)


def assert_matches(inputs, result, grads, expected=None):
    expected = expected or expect(inputs)
    got = dict(zip(expected.tensors, (*result, *grads), strict=True))
    for name, tensor in got.items():
        wanted = F32 if name in ("lse", "sinks") else inputs.case.dtype
        assert tensor.dtype == wanted, name
        error = differences(tensor, expected.tensors[name])
        worst = error.max().item() if error.numel() else 0.0
        assert worst <= expected.allowed[name], (
            f"{inputs.case}: {name} is off by {worst:.3g}, allowed {expected.allowed[name]:.3g}"
        )


IMPLEMENTATIONS = [
    "reference",
    "cpu",
    pytest.param("triton", marks=pytest.mark.interpret),
]


@pytest.fixture(params=IMPLEMENTATIONS)
def impl(request):
    return request.param


def device_of(impl):
    return "cuda" if impl in ("hopper", "triton") and ON_GPU else "cpu"


def check(case, impl):
    inputs = Inputs(case, device_of(impl))
    with poisoned_memory():
        result, grads = inputs.run(impl)
    assert_matches(inputs, result, grads)


TINY = [
    Case(batch=2),
    Case((5,), (7,), batch=1, causal=True),
    Case((9,), (4,), batch=2, causal=True),  # queries that see no key
    Case((3, 0, 6, 2), (5, 4, 6, 0)),
    Case((3, 0, 6, 2), (5, 4, 6, 0), causal=True, has_sinks=True),
    Case((2, 17), (40, 17), 6, 2, causal=True),
    Case((20,), (40,), batch=1, causal=True, sliding_window=7),
    Case((20,), (40,), batch=1, sliding_window=7),
    Case((20,), (40,), batch=1, causal=True, sliding_window=1),
    Case((6, 9), (20, 9), logits_soft_cap=1.0, has_alibi=True),
    Case((6, 9), (20, 9), 2, 1, 24, 40, logits_soft_cap=1.0, softmax_scale=2.0, causal=True),
    Case((6,), (20,), 2, 2, 8, 72, batch=1, dtype=F16),
    Case((6, 0, 40), (20, 3, 40), 2, 1, 40, dtype=F16, causal=True, has_sinks=True),
    Case((6,), (6,), batch=1, softmax_scale=0.0),
    Case((), ()),
    Case((0,), (3,), batch=1),
    Case((3,), (0,), batch=2),
]
LARGE = [
    *(Case((n,), (n,), batch=1, causal=True, head_size=8) for n in (63, 64, 65, 130)),
    *(Case((70,), (200,), 8, 2, d, batch=2, causal=True) for d in (8, 24, 64, 96, 128, 256)),
    Case((1, 300, 64, 0, 5), (700, 300, 65, 9, 0), 6, 2, 64, causal=True),
    Case((1, 300, 64, 0, 5), (700, 300, 65, 9, 0), 6, 2, 64, causal=True, sliding_window=70),
    Case((150,), (150,), 4, 4, 80, 128, batch=3),
    Case((90,), (150,), 4, 2, 192, batch=2, sliding_window=40),
    Case((90,), (150,), 7, 1, 128, batch=2, causal=True),
    Case((1, 200, 5), (30, 500, 9), 10, 2, 64, causal=True, has_sinks=True),
    Case((130,), (100,), 2, 2, 160, batch=1),
    Case((600,), (600,), 1, 1, 32, batch=1, causal=True),  # cut into pieces
    Case((600,), (600,), 3, 1, 32, batch=1, sliding_window=100),
    Case((90,), (120,), 4, 2, 64, batch=1, logits_soft_cap=5.0, has_alibi=True, causal=True),
    Case((90,), (120,), 4, 2, 128, batch=2, logits_soft_cap=30.0, causal=True),
    Case((70, 0, 90), (200, 9, 0), 4, 2, 256, logits_soft_cap=1.0, has_alibi=True),
    Case((150,), (190,), 4, 2, 64, batch=2, causal=True, sliding_window=128, has_sinks=True),
    Case((70, 0, 90), (200, 9, 0), 4, 2, 128, has_sinks=True),
]
DTYPES = [F32, F16, BF16]


@pytest.mark.parametrize("case", TINY, ids=str)
def test_tiny_cases_match_float64(case, impl):
    check(case, impl)


EXPANDED = [(0,), (1,), (2,), (0, 1, 2)]  # batch, length, heads: of one number each


def check_expanded(dims, impl, dtype):
    q, k, v = (torch.randn(2, 5, 4, 16, dtype=dtype, device=device_of(impl)) for _ in "qkv")
    for dim in dims:
        q, k, v = (t.narrow(dim, 0, 1).expand_as(t) for t in (q, k, v))
    found = attention(q, k, v, causal=True, impl=impl)
    wanted = attention(*(t.contiguous() for t in (q, k, v)), causal=True, impl=impl)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("dims", EXPANDED, ids=str)
def test_expanded_tensors(dims, impl):
    check_expanded(dims, impl, F32)


@pytest.mark.gpu
@pytest.mark.parametrize("dims", EXPANDED, ids=str)
def test_expanded_tensors_on_hopper(dims):
    check_expanded(dims, "hopper", BF16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", LARGE, ids=str)
def test_larger_cases_match_float64_on_a_cpu(case, dtype):
    check(replace(case, dtype=dtype), "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["hopper", "triton"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", [*TINY, *LARGE], ids=str)
def test_all_cases_match_float64_on_a_gpu(case, dtype, impl):
    if impl == "hopper":
        if torch.cuda.get_device_capability() != (9, 0):
            pytest.skip("not a Hopper GPU")
        if dtype is F32:
            with pytest.raises(UnsupportedError, match="q is float32; float16 and bfloat16 run"):
                check(replace(case, dtype=dtype), impl)
            return
    check(replace(case, dtype=dtype), impl)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [16, 40, 72, 96, 112, 136, 160, 192, 240])
@pytest.mark.parametrize("causal", [False, True])
def test_heads_of_any_size_on_hopper(size, causal):
    lengths = (70, 300, 9, 129), (70, 700, 600, 257)
    check(Case(*lengths, 4, 2, head_size=size, causal=causal, dtype=BF16), "hopper")


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
def test_long_sequences_match_torch_on_a_gpu(causal):
    q, k, v, d = (torch.randn(2, 2100, h, 128, dtype=BF16, device="cuda") for h in (8, 2, 2, 8))
    leaves = [t.requires_grad_() for t in (q, k, v)]
    found = attention(*leaves, causal=causal).out
    expected = scaled_dot_product_attention(
        *(t.float().transpose(1, 2) for t in leaves), is_causal=causal, enable_gqa=True
    ).transpose(1, 2)
    grads = [torch.autograd.grad(out, leaves, d.to(out.dtype)) for out in (found, expected)]
    assert (found - expected).abs().max() < 0.02
    for found, expected in zip(*grads, strict=True):
        assert (found.float() - expected).norm() < 0.01 * expected.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [(1500,) * 2, (2000, 900, 100)], ids=str)
@pytest.mark.parametrize("size", [64, 128, 256])
def test_every_launch_begins_with_its_first_tile(size, lengths):
    """Programs draw tiles from a counter, which each launch leaves at zero (decision 34)."""
    starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device="cuda")
    q, k, v = (torch.randn(sum(lengths), 32, size, dtype=BF16, device="cuda") for _ in range(3))
    options = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "causal": True}
    options |= {"max_query_len": max(lengths), "max_seq_len": max(lengths)}
    expected = attention(q, k, v, **options).out
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [attention(q, k, v, **options).out for _ in range(2)]
    for _ in range(3):
        for result in results:
            result.fill_(torch.nan)
        graph.replay()
        assert all(torch.equal(result, expected) for result in results)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [64, 128, 256])
def test_gradients_on_a_gpu_where_a_sequence_is_nan(size):
    """Gradients are added into one sum, which must not mix sequences."""
    q, k, v = (torch.randn(3, 300, h, size, dtype=BF16, device="cuda") for h in (4, 2, 2))
    grads = []
    for value in (1.0, math.nan):
        leaves = [t.clone() for t in (q, k, v)]
        for leaf in leaves:
            leaf[1] = value
            leaf.requires_grad_()
        attention(*leaves, causal=True).out.sum().backward()  # of one number, expanded
        grads.append([leaf.grad[::2].float() for leaf in leaves])
    for one, other in zip(*grads, strict=True):
        assert (one - other).norm() <= 0.01 * one.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("size", [64, 128])
def test_gradients_have_the_same_bits_where_torch_is_to_give_them(size):
    leaves = [
        torch.randn(1, 2000, 2, size, dtype=BF16, device="cuda", requires_grad=True)
        for _ in range(3)
    ]
    out = attention(*leaves).out
    torch.use_deterministic_algorithms(True)
    try:
        runs = [torch.autograd.grad(out, leaves, out, retain_graph=True) for _ in range(3)]
    finally:
        torch.use_deterministic_algorithms(False)
    for first, *others in zip(*runs, strict=True):
        assert all(torch.equal(first, other) for other in others)


@pytest.mark.interpret
@pytest.mark.parametrize("has_d_lse", [False, True])
def test_rows_beyond_a_sequence_have_no_weights(has_d_lse):
    """A tile of queries may extend past its sequence: on Hopper all have one length."""
    from pagetile.ops.attention.problem import Problem
    from pagetile.ops.attention.triton_backward import prepare

    device = "cuda" if ON_GPU else "cpu"
    problem = Problem(2, 10, 5, 5, 3, 3, 24, 24, F32, is_ragged=False)
    out, d_out = torch.randn(2, 2, 5, 3, 24, device=device)
    lse, d_lse = torch.randn(2, 2, 5, 3, device=device)
    lse[1, 2] = -math.inf  # a row that sees no key
    delta, lse2 = prepare(problem, 8, out, d_out, lse, d_lse if has_d_lse else None)
    delta, lse2 = (t.unflatten(1, (2, 8)).permute(1, 2, 0) for t in (delta, lse2))
    total = (out * d_out).sum(-1) - (d_lse if has_d_lse else 0.0)
    torch.testing.assert_close(delta[:, :5], total)
    seen = torch.where(lse == -math.inf, math.inf, lse / math.log(2))
    torch.testing.assert_close(lse2[:, :5], seen)
    assert (delta[:, 5:] == 0).all()
    assert (lse2[:, 5:] == math.inf).all()


@pytest.mark.interpret
def test_sums_of_gradients_are_scaled_and_rounded():
    """From whole tiles to the rows that exist, and from a tile's columns to the head's."""
    from pagetile.ops.attention.hopper_backward import make_finish

    device = "cuda" if ON_GPU else "cpu"
    sums = torch.randn(3, 2, 128, 64, device=device)  # heads, sequences, rows, columns
    d_q = torch.full((2, 70, 3, 40), math.nan, dtype=F16, device=device)
    make_finish(F16, 40, 64)((2 * 3 * 2, 1, 1), d_q, sums, 2, 3, 70, 128, 0.5)
    expected = (sums.permute(1, 2, 0, 3)[:, :70, :, :40] * 0.5).to(F16)
    assert torch.equal(d_q, expected)


# --- the reference, and what the others are measured with -----------------------------------


@pytest.mark.parametrize("causal", [False, True])
def test_the_reference_is_torch_attention(causal):
    q, k, v = (torch.randn(2, 9, h, 16, dtype=F64) for h in (4, 2, 2))
    found = attention(q, k, v, causal=causal, impl="reference").out
    expected = scaled_dot_product_attention(
        *(t.transpose(1, 2) for t in (q, k, v)), is_causal=causal, enable_gqa=True
    )
    torch.testing.assert_close(found, expected.transpose(1, 2), rtol=0, atol=1e-14)


GRADCHECKED = [
    Case((4,), (6,), batch=1, dtype=F64),
    Case((4,), (6,), batch=1, dtype=F64, causal=True, sliding_window=2),
    Case((5,), (3,), batch=1, dtype=F64, causal=True),
    Case((3, 0, 2), (4, 2, 0), dtype=F64, causal=True, has_sinks=True),
    Case((4,), (6,), 2, 1, 8, 16, batch=1, dtype=F64, logits_soft_cap=0.7, has_alibi=True),
]


@pytest.mark.parametrize("case", GRADCHECKED, ids=str)
def test_gradients_of_the_reference_match_finite_differences(case):
    inputs = Inputs(case)
    leaves = [t.clone().requires_grad_() for t in (inputs.q, inputs.k, inputs.v)]
    sinks = inputs.options.pop("sinks")
    if sinks is not None:
        leaves.append(sinks.double().requires_grad_())

    def call(q, k, v, sinks=None):
        return attention(q, k, v, sinks=sinks, **inputs.lengths, **inputs.options).out

    assert torch.autograd.gradcheck(call, leaves)


def test_gradients_through_lse_are_autograds():
    inputs = Inputs(replace(TINY[1], dtype=F64))
    q, k = (t.clone().requires_grad_() for t in (inputs.q, inputs.k))
    lse = attention(q, k, inputs.v, causal=True).lse.double()
    direct = attend(q[0], k[0], inputs.v[0], softmax_scale=0.25, causal=True)[1]
    got, wanted = (torch.autograd.grad(x.sin().sum(), (q, k)) for x in (lse, direct))
    for found, expected in zip(got, wanted, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_a_sink_of_minus_infinity_is_none(impl):
    inputs = Inputs(Case((9,), (4,), batch=2, causal=True, has_sinks=True), device_of(impl))
    inputs.options["sinks"].fill_(-math.inf)
    (out, lse), (*grads, d_sinks) = inputs.run(impl)
    inputs.options["sinks"] = None
    without = inputs.run(impl)
    for found, expected in zip((out, lse, *grads), itertools.chain(*without), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert not d_sinks.any()


def test_a_wrong_gradient_is_refused():
    inputs = Inputs(Case((40,), (40,), batch=1, causal=True, dtype=BF16))
    result, grads = inputs.run("reference")
    expected = expect(inputs)
    assert_matches(inputs, result, grads, expected)
    for name, bound in expected.allowed.items():
        assert 0 < bound < 0.1 * expected.tensors[name].abs().max(), name
    for i, name in enumerate(GRADIENTS):
        wrong = [g.clone() for g in grads]
        wrong[i][0, 3, 1, 2] += 2.5 * expected.allowed[name]
        with pytest.raises(AssertionError, match=f"{name} is off by"):
            assert_matches(inputs, result, wrong, expected)


def test_inputs_are_poisoned_between():
    inputs = Inputs(TINY[3])
    for tensor in (inputs.q, inputs.k, inputs.v, inputs.d_out):
        buffer = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
        assert buffer.isnan().sum() == buffer.numel() - tensor.numel()
        assert tensor.isfinite().all()


# --- properties ------------------------------------------------------------------------------


def test_the_same_inputs_give_the_same_bits(impl):
    inputs = Inputs(Case((3, 30), (50, 30), causal=True), device_of(impl))
    first, second = (inputs.run(impl) for _ in range(2))
    for a, b in zip((*first[0], *first[1]), (*second[0], *second[1]), strict=True):
        assert torch.equal(a.view(torch.int32), b.view(torch.int32))


def test_a_sequence_does_not_see_its_neighbours(impl):
    inputs = Inputs(Case((4, 5, 3), (6, 9, 3)), device_of(impl))
    alone, alone_grads = inputs.run(impl)
    for tensor in (inputs.q, inputs.d_out):
        tensor[4:9] = math.nan
    for tensor in (inputs.k, inputs.v):
        tensor[6:15] = math.nan
    together, grads = inputs.run(impl)
    for rows in (slice(0, 4), slice(9, 12)):
        for a, b in zip((*alone, alone_grads[0]), (*together, grads[0]), strict=True):
            assert torch.equal(a[rows], b[rows])
    for rows in (slice(0, 6), slice(15, 18)):
        for a, b in zip(alone_grads[1:], grads[1:], strict=True):
            assert torch.equal(a[rows], b[rows])


def test_upper_bounds_of_lengths_are_enough(impl):
    inputs = Inputs(Case((4, 5), (6, 9), causal=True), device_of(impl))
    exact = inputs.run(impl)[0]
    for name in ("max_query_len", "max_seq_len"):
        del inputs.lengths[name]
    for a, b in zip(exact, inputs.run(impl)[0], strict=True):
        assert torch.equal(a, b)


def test_keys_have_the_lengths_of_queries_by_default():
    inputs = Inputs(Case((4, 5), (4, 5), causal=True))
    wanted = inputs.run("reference")[0]
    del inputs.lengths["cu_seqlens_k"], inputs.lengths["max_seq_len"]
    assert torch.equal(inputs.run("reference")[0].out, wanted.out)


# --- torch's machinery -----------------------------------------------------------------------


def leaves_of(*heads, dtype=F32, tokens=6):
    return [torch.randn(1, tokens, h, 16, dtype=dtype).requires_grad_() for h in heads]


@pytest.mark.parametrize("impl", ["reference", "cpu"])
@pytest.mark.parametrize("case", [Case((3, 4), (5, 4)), Case((3,), (5,), batch=2, head_size=24)])
def test_the_operation_keeps_torchs_contract(case, impl):
    operator = torch.ops.pagetile.attention.default

    inputs = Inputs(replace(case, causal=True))
    leaves = [t.detach().requires_grad_() for t in (inputs.q, inputs.k, inputs.v)]
    lengths = list(inputs.lengths.values()) or [None] * 4
    sinks = torch.randn(4, requires_grad=True)
    options = (None, sinks, None, *lengths[2:], 0.3, True, None, None, 0, 0, impl)
    torch.library.opcheck(operator, (*leaves, *lengths[:2], *options))


def test_attention_compiles_as_one_node():
    leaves = leaves_of(4, 2, 2)

    def call(q, k, v):
        return attention(q * 2, k, v, causal=True).out.square().sum()

    whole = torch.compile(call, fullgraph=True, backend="aot_eager")
    got, wanted = (torch.autograd.grad(f(*leaves), leaves) for f in (whole, call))
    for found, expected in zip(got, wanted, strict=True):
        torch.testing.assert_close(found, expected)


def test_checkpoints_compute_it_again():
    from torch.utils.checkpoint import checkpoint

    leaves = leaves_of(4, 2, 2)

    def call(*leaves):
        return attention(*leaves, causal=True).out

    got = checkpoint(call, *leaves, use_reentrant=False)
    grads = [torch.autograd.grad(out.sin().sum(), leaves) for out in (got, call(*leaves))]
    for found, expected in zip(*grads, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("impl", ["reference", "cpu"])
def test_autocast_casts_as_torchs_attention_does(impl):
    q, k, v = leaves_of(4, 2, 2)
    with torch.autocast("cpu", BF16):
        result = attention(q, k.to(F16), v, impl=impl)
        result.out.float().sum().backward()
    plain = attention(q.to(BF16), k.to(F16).to(BF16), v.to(BF16), impl=impl)
    assert result.out.dtype == BF16
    assert torch.equal(result.out, plain.out)
    assert torch.equal(result.lse, plain.lse)
    wanted = torch.autograd.grad(plain.out.float().sum(), (q, k, v))
    for leaf, gradient in zip((q, k, v), wanted, strict=True):
        assert leaf.grad.dtype == F32
        assert torch.equal(leaf.grad, gradient)


def test_nothing_but_arguments_out_and_lse_is_saved():
    leaves = leaves_of(4, 2, 2, tokens=50)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape), lambda t: t):
        attention(*leaves)
    assert sum(shape.numel() for shape in saved) == 50 * 16 * (4 + 2 + 2 + 4) + 50 * 4


def test_saved_tensors_may_come_back_at_any_address(monkeypatch):
    """GPU kernels load 16 bytes of the results at a time."""
    starts, backward = [], reference.run_backward

    def record(*inputs):
        starts.extend(tensor.data_ptr() % 16 for tensor in inputs[6:8])  # out and lse
        return backward(*inputs)

    def shift(tensor):
        return torch.cat([tensor.new_zeros(1), tensor.flatten()])[1:].view(tensor.shape)

    monkeypatch.setattr(reference, "run_backward", record)
    leaves, found = leaves_of(4, 2, 2), []
    for unpack in (torch.clone, shift):
        with torch.autograd.graph.saved_tensors_hooks(torch.detach, unpack):
            out = attention(*leaves, impl="reference").out
        found.append(torch.autograd.grad(out.sum(), leaves))
    torch.testing.assert_close(*found)
    assert starts == [0, 0, 0, 0]


def test_only_one_of_out_and_lse_may_be_used():
    leaves = leaves_of(4, 2, 2)
    for i in range(2):
        result = attention(*leaves)
        grads = torch.autograd.grad(result[i].sum(), leaves, allow_unused=True)
        assert grads[0].abs().sum() > 0


def test_the_output_has_names():
    assert isinstance(attention(*leaves_of(4, 2, 2)), AttentionOutput)


# --- refusals --------------------------------------------------------------------------------


def test_slopes_have_no_gradient():
    slopes = torch.ones(4, requires_grad=True)
    with pytest.raises(UnsupportedError, match=r"alibi_slopes requires a gradient.*detach"):
        attention(*leaves_of(4, 2, 2), alibi_slopes=slopes)
    with torch.no_grad():
        attention(*leaves_of(4, 2, 2), alibi_slopes=slopes)


def test_a_named_implementation_never_falls_back():
    with pytest.raises(UnsupportedError, match="cpu cannot run this: q is float64"):
        attention(*leaves_of(4, 2, 2, dtype=F64), impl="cpu")
    with pytest.raises(
        UnsupportedError, match="expected 'auto' or one of hopper, triton, cpu, reference"
    ):
        attention(*leaves_of(4, 2, 2), impl="flash")


def test_explain_names_each_with_its_reason():
    lines = explain_attention(*leaves_of(4, 2, 2), causal=True).splitlines()
    assert [line.split(":")[0] for line in lines] == ["hopper", "triton", "cpu", "reference"]
    assert lines[2:] == ["cpu: yes", "reference: yes"]


def test_explain_takes_what_the_call_takes():
    q, k, v = (
        torch.zeros(1, 4, 2, 16),
        torch.zeros(1, 4, 2, 16, dtype=F16),
        torch.zeros(1, 4, 2, 16),
    )
    with torch.autocast("cpu", torch.bfloat16):
        attention(q, k, v, sliding_window=np.uint8(3))
        assert "cpu: yes" in explain_attention(q, k, v, sliding_window=np.uint8(3))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [2**63 - 1, 2**31 - 1, np.uint8(255), np.uint32(300)], ids=repr)
@pytest.mark.parametrize("lengths", [(100, 30), (30, 100)])
def test_a_window_over_everything_hides_nothing(lengths, impl, window, causal):
    q_len, k_len = lengths
    lengths, device = (q_len, k_len, k_len), device_of(impl)
    rows = [torch.randn(1, n, 2, 16, requires_grad=True, device=device) for n in lengths]

    def run(keys):
        out = attention(*rows, causal=causal, sliding_window=keys, impl=impl).out
        return out, *torch.autograd.grad(out.sin().sum(), rows)

    for found, expected in zip(run(window), run(None), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("length", [65, 129, 193])
def test_a_row_has_the_same_bits_on_any_number_of_threads_and_in_any_batch(length):
    """The last tile may have one row, and where tiles end depends on both."""
    x = torch.randn(1, length, 2, 64)
    before = torch.get_num_threads()
    try:
        found = []
        for threads, batch in ((1, 1), (2, 1), (2, 8)):
            torch.set_num_threads(threads)
            wide = x.repeat(batch, 1, 1, 1)
            found.append(attention(wide, wide, wide, impl="cpu").out[:1])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
