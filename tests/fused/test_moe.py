import math

import pytest
import torch

from pagetile.errors import DTypeError, ShapeError, UnsupportedError
from pagetile.fused.moe import ACTIVATIONS, moe_experts
from pagetile.fused.moe.problem import Expert

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


@pytest.fixture(params=["reference", pytest.param("triton", marks=pytest.mark.interpret)])
def impl(request):
    return request.param


def problem(num_tokens, top_k, sizes, dtype=F32, layout="rows", has_bias=False):
    """``x``, ``experts``, ``weights`` and the six tensors of the experts, in one of two layouts."""
    num_experts, hidden, inner = sizes
    generator = torch.Generator().manual_seed(num_tokens * 100 + top_k)

    def randn(*shape):
        return torch.randn(shape, generator=generator)

    x = randn(num_tokens, hidden).to(dtype)
    chosen = torch.rand(num_tokens, num_experts, generator=generator).argsort(dim=1)[:, :top_k]
    chosen = chosen.contiguous()
    weights = torch.rand(num_tokens, top_k, generator=generator)
    if layout == "rows":  # Mixtral's: a row a column of the output, gate above up
        both = (randn(num_experts, 2 * inner, hidden) / math.sqrt(hidden)).to(dtype)
        gate, up = both[:, :inner], both[:, inner:]
        down = (randn(num_experts, hidden, inner) / math.sqrt(inner)).to(dtype)
    else:  # gpt-oss's: transposed, gate and up in turn
        both = (randn(num_experts, hidden, 2 * inner) / math.sqrt(hidden)).to(dtype)
        gate, up = both[:, :, ::2].transpose(1, 2), both[:, :, 1::2].transpose(1, 2)
        down = (randn(num_experts, inner, hidden) / math.sqrt(inner)).to(dtype).transpose(1, 2)
    biases = ()
    if has_bias:
        both_bias = randn(num_experts, 2 * inner).to(dtype)
        biases = both_bias[:, ::2], both_bias[:, 1::2], randn(num_experts, hidden).to(dtype)
    return x, chosen, weights, Expert(gate, up, down, *biases)


def by_hand(x, chosen, weights, expert, activation, alpha=1.7, limit=1.5):
    """The formula in float64, an expert at a time."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for e in chosen.unique().tolist():
        tokens, places = (chosen == e).nonzero(as_tuple=True)
        w = [None if t is None else t[e].double() for t in expert]
        bias = [0.0 if b is None else b for b in w[3:]]
        g, u = (x[tokens].double() @ w[at].T + bias[at] for at in (0, 1))
        if activation == "silu":
            y = g * torch.sigmoid(g) * u
        else:
            g, u = g.clamp(max=limit), u.clamp(-limit, limit)
            y = g * torch.sigmoid(alpha * g) * (u + 1)
        made = (y @ w[2].T + bias[2]) * weights[tokens, places, None].double()
        out.index_add_(0, tokens, made)
    return out


def run(x, chosen, weights, expert, impl, mirror, activation="silu"):
    given = [t for t in expert if t is not None]
    with mirror(x, chosen, weights, *given, impl=impl) as (x, chosen, weights, *given):
        options = {"activation": activation, "alpha": 1.7, "limit": 1.5, "impl": impl}
        return moe_experts(x, chosen, weights, Expert(*given), **options).cpu()


def check(out, true, dtype):
    band = {F32: 1e-5, F16: 4e-3, BF16: 3e-2}[dtype]
    assert out.dtype == dtype
    error = (out.double() - true).norm(dim=-1) / true.norm(dim=-1).clamp_min(1e-9)
    assert error.max() <= band, error


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("layout", ["rows", "columns"])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_every_token_gets_its_experts(dtype, has_bias, layout, activation, impl, mirror):
    x, chosen, weights, expert = problem(5, 2, (4, 40, 24), dtype, layout, has_bias)
    out = run(x, chosen, weights, expert, impl, mirror, activation)
    check(out, by_hand(x, chosen, weights, expert, activation), dtype)


@pytest.mark.parametrize(
    ("num_tokens", "top_k", "num_experts"),
    [(1, 1, 1), (1, 4, 8), (3, 2, 130), (40, 2, 2), (70, 1, 3), (0, 2, 4)],
)
def test_any_number_of_pairs(num_tokens, top_k, num_experts, impl, mirror):
    x, chosen, weights, expert = problem(num_tokens, top_k, (num_experts, 24, 16))
    out = run(x, chosen, weights, expert, impl, mirror)
    assert out.shape == x.shape
    if num_tokens:
        check(out, by_hand(x, chosen, weights, expert, "silu"), F32)


def test_one_expert_for_all_and_others_of_nan(impl, mirror):
    x, chosen, weights, expert = problem(37, 1, (5, 24, 16))
    chosen = torch.full_like(chosen, 3)
    for weight in expert[:3]:
        weight[[0, 1, 2, 4]] = math.nan
    out = run(x, chosen, weights, expert, impl, mirror)
    check(out, by_hand(x, chosen, weights, expert, "silu"), F32)


def test_a_token_does_not_see_the_others(impl, mirror):
    x, chosen, weights, expert = problem(9, 2, (4, 24, 16))
    alone = torch.cat(
        [run(x[t : t + 1], chosen[t : t + 1], weights[t : t + 1], expert, impl, mirror)
         for t in range(9)]
    )  # fmt: skip
    # NumPy's products, which the interpreter takes, may round a row by its place in a tile.
    rounded = impl == "triton" and not torch.cuda.is_available()
    error = 1e-6 if rounded else 0
    found = run(x, chosen, weights, expert, impl, mirror)
    torch.testing.assert_close(found, alone, rtol=error, atol=error)
    x[4] = math.nan
    out = run(x, chosen, weights, expert, impl, mirror)
    others = [t for t in range(9) if t != 4]
    torch.testing.assert_close(out[others], alone[others], rtol=error, atol=error)
    assert out[4].isnan().all()


def test_sixteen_bit_weights_of_the_router(impl, mirror):
    x, chosen, weights, expert = problem(5, 2, (4, 40, 24), F16)
    out = run(x, chosen, weights.half(), expert, impl, mirror)
    check(out, by_hand(x, chosen, weights.half(), expert, "silu"), F16)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 16, 256])
@pytest.mark.parametrize(("layout", "activation"), [("rows", "silu"), ("columns", "clamped")])
def test_sizes_of_large_models(num_tokens, dtype, layout, activation, mirror):
    has_bias = activation == "clamped"
    x, chosen, weights, expert = problem(num_tokens, 8, (64, 2048, 768), dtype, layout, has_bias)
    out = run(x, chosen, weights, expert, "triton", mirror, activation)
    check(out, by_hand(x, chosen, weights, expert, activation), dtype)


@pytest.mark.gpu
def test_a_graph_replays_with_another_routing():
    given = problem(8, 2, (16, 64, 32), BF16)
    x, chosen, weights = (t.cuda() for t in given[:3])
    expert = Expert(*(t.cuda() for t in given[3][:3]))
    moe_experts(x, chosen, weights, expert)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = moe_experts(x, chosen, weights, expert)
    other = (chosen.cpu() + 5) % 16
    chosen.copy_(other)
    graph.replay()
    check(out.cpu(), by_hand(given[0], other, given[2], given[3], "silu"), BF16)


def test_a_refusal_gives_its_reason():
    x, chosen, weights, expert = problem(3, 2, (4, 24, 16))
    with pytest.raises(ShapeError, match=r"down is \[4, 16, 24\], expected \[4, 24, 16\]"):
        moe_experts(x, chosen, weights, expert._replace(down=expert.down.mT))
    with pytest.raises(ShapeError, match=r"weights \[2, 2\], expected \[3, top_k\]"):
        moe_experts(x, chosen, weights[:2], expert)
    with pytest.raises(DTypeError, match=r"experts is torch\.int32"):
        moe_experts(x, chosen.int(), weights, expert)
    with pytest.raises(DTypeError, match=r"up is torch\.float16"):
        moe_experts(x, chosen, weights, expert._replace(up=expert.up.half()))
    with pytest.raises(UnsupportedError, match="activation is 'relu'"):
        moe_experts(x, chosen, weights, expert, activation="relu")
    strided = x[:1].repeat_interleave(2, 1)[:, ::2]
    with pytest.raises(UnsupportedError, match="need rows without gaps"):
        moe_experts(strided, chosen[:1], weights[:1], expert, impl="triton")
    with pytest.raises(UnsupportedError, match="triton cannot run this"):
        moe_experts(x.requires_grad_(), chosen, weights, expert, impl="triton")
