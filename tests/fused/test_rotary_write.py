import pytest
import torch

from pagetile.errors import DTypeError, ShapeError, UnsupportedError
from pagetile.fused.rms_norm import Norm
from pagetile.fused.rotary_write import Heads, rotate_and_write

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
SLOTS = torch.tensor([9, -1, 3, 14, 0])
NUM_TOKENS, NUM_BLOCKS, BLOCK_SIZE = 5, 4, 4


@pytest.fixture(params=["cpu", "reference", pytest.param("triton", marks=pytest.mark.interpret)])
def impl(request):
    return request.param


def by_hand(x, weight, eps, kind, cos, sin, is_shared):
    """The result for float64 heads ``[num_tokens, heads, size]``."""
    if weight is not None:
        x = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * (weight + (kind == "shifted"))
    if cos is None:
        return x
    if is_shared:
        cos, sin = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
    n = cos.shape[-1]
    rotary, rest = x[..., :n], x[..., n:]
    half = torch.cat((-rotary[..., n // 2 :], rotary[..., : n // 2]), -1)
    return torch.cat((rotary * cos[0][:, None] + half * sin[0][:, None], rest), -1)


def draw(heads, n, dtype, num_tokens=NUM_TOKENS):
    generator = torch.Generator().manual_seed(heads.width)
    qkv = torch.randn(num_tokens, heads.width, generator=generator).to(dtype)
    angles = [torch.randn(1, num_tokens, max(n, 1), generator=generator).to(dtype)] * 1
    angles.append(torch.randn(1, num_tokens, max(n, 1), generator=generator).to(dtype))
    weights = [torch.randn(heads.head_size, generator=generator).to(dtype) for _ in range(2)]
    return qkv, *angles, *weights


def make_caches(heads, dtype, fill=7.0):
    shape = NUM_BLOCKS, BLOCK_SIZE, heads.num_kv_heads
    return [
        torch.full((*shape, size), fill, dtype=dtype)
        for size in (heads.head_size, heads.v_head_size)
    ]


def check(heads, n, dtype, impl, mirror, kinds=("", ""), cache_dtype=None):
    qkv, cos, sin, *weights = draw(heads, n, dtype)
    caches = make_caches(heads, cache_dtype or dtype)
    with mirror(qkv, cos, sin, *weights, *caches, SLOTS, impl=impl) as there:
        given, angles, there_weights = there[0], there[1:3], there[3:5]
        norms = [
            Norm(w, e, k) if k else None
            for w, e, k in zip(there_weights, (1e-5, 1e-2), kinds, strict=True)
        ]
        q = rotate_and_write(
            given, *(angles if n else (None, None)),
            heads._replace(q_norm=norms[0], k_norm=norms[1]), *there[5:], impl=impl,
        ).cpu()  # fmt: skip
    sizes = [heads.num_heads * heads.head_size, heads.num_kv_heads * heads.head_size]
    parts = qkv.double().split([*sizes, heads.num_kv_heads * heads.v_head_size], -1)
    true = [
        by_hand(
            part.unflatten(-1, (-1, heads.head_size)), w.double() if k else None, e, k,
            cos.double() if n else None, sin.double(), heads.is_shared,
        )
        for part, w, e, k in zip(parts[:2], weights, (1e-5, 1e-2), kinds, strict=True)
    ]  # fmt: skip
    true.append(parts[2].unflatten(-1, (-1, heads.v_head_size)))
    written = SLOTS >= 0
    found = [q, *(cache.flatten(0, 1)[SLOTS[written]] for cache in caches)]
    expected = [true[0], true[1][written], true[2][written]]
    for computed, exact in zip(found, expected, strict=True):
        eps = max(torch.finfo(dtype).eps, torch.finfo(computed.dtype).eps)
        assert computed.shape == exact.shape
        assert (computed.double() - exact).norm() <= 3 * eps * exact.norm()
    for cache in caches:  # all other slots
        rest = cache.flatten(0, 1)
        assert (rest[[s for s in range(16) if s not in SLOTS]] == 7).all()


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("kinds", [("", ""), ("rounded", "rounded"), ("shifted", "scaled")])
@pytest.mark.parametrize(
    ("heads", "n"),
    [
        (Heads(4, 2, 16, 16), 16),
        (Heads(7, 1, 24, 24), 8),
        (Heads(3, 3, 32, 16, is_shared=True), 16),
        (Heads(2, 2, 40, 48, is_shared=True), 6),
        (Heads(4, 2, 16, 16), 0),
    ],
    ids=str,
)
def test_queries_come_back_and_keys_and_values_are_written(impl, heads, n, kinds, dtype, mirror):
    check(heads, n, dtype, impl, mirror, kinds)


@pytest.mark.parametrize(("dtype", "cache_dtype"), [(F32, F16), (F16, F32)], ids=str)
def test_a_cache_of_another_type(impl, dtype, cache_dtype, mirror):
    check(Heads(4, 2, 16, 16), 16, dtype, impl, mirror, cache_dtype=cache_dtype)


@pytest.mark.parametrize("kernel", ["cpu", pytest.param("triton", marks=pytest.mark.gpu)])
def test_large_models_heads(kernel, mirror):
    check(Heads(32, 8, 128, 128), 128, BF16, kernel, mirror, ("rounded", "rounded"))


@pytest.mark.parametrize("slot", [NUM_BLOCKS * BLOCK_SIZE, -2])
def test_a_slot_outside_of_the_cache_is_named_and_nothing_is_written(slot):
    heads = Heads(4, 2, 16, 16)
    qkv, cos, sin, *_ = draw(heads, 16, F32)
    caches = make_caches(heads, F32)
    slots = SLOTS.clone()
    slots[3] = slot
    with pytest.raises(ShapeError, match=rf"slot_mapping\[3\] is {slot}"):
        rotate_and_write(qkv, cos, sin, heads, *caches, slots, impl="cpu")
    assert all((cache == 7).all() for cache in caches)


@pytest.mark.parametrize("scales", ["tensor", "head", "token"])
@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [
        ("cpu", torch.int8),
        ("cpu", torch.float8_e4m3fn),
        ("cpu", torch.float8_e5m2),
        pytest.param("triton", torch.int8, marks=pytest.mark.interpret),
        pytest.param("triton", torch.float8_e4m3fn, marks=pytest.mark.gpu),
        pytest.param("triton", torch.float8_e5m2, marks=pytest.mark.gpu),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("heads", "n"), [(Heads(4, 2, 16, 16), 16), (Heads(3, 1, 24, 40), 8)], ids=["all", "rest"]
)
def test_an_8_bit_cache_is_quantised_as_by_write_kv(heads, n, kernel, dtype, scales, mirror):
    qkv, cos, sin, weight, _ = draw(heads, n, F32)
    num_kv_heads = heads.num_kv_heads
    shape = {"tensor": (), "head": (num_kv_heads,)}.get(
        scales, (NUM_BLOCKS, BLOCK_SIZE, num_kv_heads)
    )
    results = []
    for impl in ("reference", kernel):
        caches = make_caches(heads, F32, fill=0)
        caches = [cache.to(dtype) for cache in caches]
        each = [torch.full(shape, 0.02) for _ in range(2)]
        with mirror(qkv, cos, sin, weight, *caches, *each, SLOTS, impl=impl) as there:
            norm = Norm(there[3], 1e-5, "rounded")
            q = rotate_and_write(
                *there[:3], heads._replace(q_norm=norm, k_norm=norm), *there[4:6], there[8],
                k_scale=there[6], v_scale=there[7], impl=impl,
            )  # fmt: skip
            results.append([q.cpu(), *caches, *each])
        results[-1][1:] = [*caches, *each]
    (q, *own), (computed, *found) = results
    torch.testing.assert_close(computed, q)
    for a, b in zip(found[:2], own[:2], strict=True):
        # Numbers that differ in their last bit may be rounded to neighbouring codes.
        difference = (a.view(torch.int8).int() - b.view(torch.int8).int()).abs()
        assert difference.max() <= 1
        assert (difference > 0).sum() <= 2
        assert (a.float() != 0).any()
    for a, b in zip(found[2:], own[2:], strict=True):
        torch.testing.assert_close(a, b)
        assert scales != "token" or (a.flatten(0, 1)[SLOTS[SLOTS >= 0]] != 0.02).all()


@pytest.mark.interpret
def test_a_row_with_nan_is_marked_by_its_scale(mirror):
    heads = Heads(2, 1, 16, 16)
    qkv, cos, sin, *_ = draw(heads, 16, F32)
    qkv[0, 2 * 16 + 3] = torch.nan  # of a key
    qkv[2, 3 * 16 + 3] = torch.inf  # of a value
    caches = [cache.to(torch.int8) for cache in make_caches(heads, F32)]
    scales = [torch.ones(NUM_BLOCKS, BLOCK_SIZE, 1) for _ in range(2)]
    with mirror(qkv, cos, sin, *caches, *scales, SLOTS, impl="triton") as there:
        rotate_and_write(
            *there[:3], heads, *there[3:5], there[7],
            k_scale=there[5], v_scale=there[6], impl="triton",
        )  # fmt: skip
    is_nan = [scale.flatten(0, 1)[:, 0].isnan().nonzero().flatten().tolist() for scale in scales]
    assert is_nan == [[9], [3]]


def test_no_tokens(impl):
    heads = Heads(4, 2, 16, 16)
    device = "cuda" if impl == "triton" and torch.cuda.is_available() else "cpu"
    qkv, cos, sin, *_ = (t.to(device) for t in draw(heads, 16, F32, 0))
    caches = [cache.to(device) for cache in make_caches(heads, F32)]
    slots = SLOTS[:0].to(device)
    assert rotate_and_write(qkv, cos, sin, heads, *caches, slots, impl=impl).shape == (0, 4, 16)


def test_wrong_arguments_are_named():
    heads = Heads(4, 2, 16, 16)
    qkv, cos, sin, *_ = draw(heads, 16, F32)
    caches = make_caches(heads, F32)
    with pytest.raises(ShapeError, match=r"qkv is \[5, 100\], expected \[num_tokens, 128\]"):
        rotate_and_write(qkv[:, :100], cos, sin, heads, *caches, SLOTS)
    with pytest.raises(ShapeError, match="slot_mapping has num_tokens=4"):
        rotate_and_write(qkv, cos, sin, heads, *caches, SLOTS[:4])
    with pytest.raises(ShapeError, match="cos turns 32 numbers of a head of 16"):
        rotate_and_write(qkv, cos, sin, heads._replace(is_shared=True), *caches, SLOTS)
    with pytest.raises(DTypeError, match="cos is float64"):
        rotate_and_write(qkv, cos.double(), sin, heads, *caches, SLOTS)
    wide = torch.zeros(5, 256)[:, ::2]
    with pytest.raises(UnsupportedError, match="not contiguous"):
        rotate_and_write(wide, cos, sin, heads, *caches, SLOTS, impl="triton")
