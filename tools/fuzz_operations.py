"""Random calls of the operations beside ``paged_attention``, for ``tools/fuzz.py``.

A trial draws one call, runs it on an implementation and returns, for each result, its error as a
part of what is allowed: over 1 is wrong. Attention and scores are compared with the reference in
float64, gradients included, and may differ by rounding: ``_ROUNDINGS`` units in the last place of
the largest number. What copies or rounds has to equal the reference bit for bit. Tensors are views
of larger ones full of NaN, their dimensions in any order.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

import pagetile
from pagetile.fused.add_norm import add_norm
from pagetile.fused.gated_activation import ACTIVATIONS, gated_activation
from pagetile.fused.instance_norm import instance_norm
from pagetile.fused.moe import moe_experts
from pagetile.fused.moe.problem import Expert
from pagetile.fused.rms_norm import KINDS, Norm, rms_norm
from pagetile.fused.rotary import rotate
from pagetile.fused.rotary_write import Heads, rotate_and_write
from pagetile.fused.small_linear import partial_products, small_linear
from pagetile.fused.take_rows import take_rows
from pagetile.integrations import vllm_ops
from pagetile.ops.scales import LARGEST_CODE
from pagetile.testing import PagedCase, make_inputs
from pagetile.testing.paged_cases import _spread

Ratios = dict[str, float]
Trial = Callable[[random.Random, str], Ratios]

_ROUNDINGS = 8
_HALVES = (torch.float16, torch.bfloat16)
_FLOAT8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def dtypes_of(impl: str) -> tuple[torch.dtype, ...]:
    """Element types that an implementation runs here: the interpreter multiplies no bfloat16."""
    return (torch.float32, torch.float16) if impl == "triton" else (torch.float32, *_HALVES)


def _generator(rng: random.Random) -> torch.Generator:
    return torch.Generator().manual_seed(rng.randrange(1 << 31))


def _normal(rng: random.Random, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    numbers = torch.randn(shape, generator=_generator(rng)).to(dtype)
    return _spread(numbers, math.nan, rng if rng.random() < 0.6 else None)


def _maybe(rng: random.Random, share: float, value: Any, other: Any = None) -> Any:
    return value if rng.random() < share else other


def _error(found: Tensor, exact: Tensor, dtype: torch.dtype, sharpness: float = 1.0) -> float:
    """The largest error, as a part of ``_ROUNDINGS`` roundings of the largest number.

    Args:
        found: A result.
        exact: The same in float64.
        dtype: The element type of the call.
        sharpness: How much an error of scores, which are float32, grows.
    """
    if found.shape != exact.shape:
        return math.inf
    found, exact = found.detach().double(), exact.detach().double()
    if not found.numel():
        return 0.0
    errors = torch.where(found == exact, 0.0, (found - exact).abs())
    errors = errors.nan_to_num(nan=math.inf, posinf=math.inf)
    finite = exact[exact.isfinite()]
    largest = 1.0 + (float(finite.abs().max()) if finite.numel() else 0.0)
    unit = torch.finfo(dtype).eps / 2 + torch.finfo(torch.float32).eps * sharpness
    return float(errors.max()) / (_ROUNDINGS * unit * largest)


def _is_same(found: Iterable[Tensor], expected: Iterable[Tensor]) -> float:
    """0 where all numbers are the same, signs of zeros included; infinity where one is not."""
    for a, b in zip(found, expected, strict=True):
        a, b = a.double(), b.double()
        equal = (a == b) & (a.signbit() == b.signbit())
        if not bool((equal | (a.isnan() & b.isnan())).all()):
            return math.inf
    return 0.0


# --- attention ----------------------------------------------------------------------------------


def try_attention(rng: random.Random, impl: str) -> Ratios:
    """``attention``: dense, BHSD or ragged, masks, gradients of all inputs and of ``lse``."""
    dtype, kind = rng.choice(dtypes_of(impl)), rng.choice(["dense", "BHSD", "ragged", "blocks"])
    kv_heads, size = rng.choice([1, 1, 2, 3]), rng.choice([8, 16, 24, 40, 64, 72, 128])
    heads = kv_heads * rng.choice([1, 1, 2, 3, 5, 7, 16])
    v_size = rng.choice([8, 32, 64, 96]) if rng.random() < 0.3 else size
    options: dict[str, Any] = {
        "causal": rng.random() < 0.5,
        "softmax_scale": rng.choice([None, None, None, 0.0, 0.3, -0.2]),
        "sliding_window": _maybe(rng, 0.3, rng.randint(1, 60)),
        "logits_soft_cap": _maybe(rng, 0.2, rng.choice([0.5, 5.0, 50.0])),
        "alibi_slopes": _maybe(rng, 0.2, torch.randn(heads, generator=_generator(rng)) / 8),
    }
    rows: tuple[int, ...]
    keys: tuple[int, ...]
    if kind == "ragged":
        count = rng.randint(1, 4)
        q_lens, k_lens = ([rng.choice([0, 1, 7, 33, 90]) for _ in range(count)] for _ in "qk")
        k_lens = q_lens if rng.random() < 0.4 else k_lens
        starts = [
            torch.tensor([0, *accumulate(lens)], dtype=torch.int32) for lens in (q_lens, k_lens)
        ]
        options |= {"cu_seqlens_q": starts[0], "cu_seqlens_k": starts[1]}
        options["max_query_len"] = _maybe(rng, 0.5, max(q_lens) + rng.randint(0, 9))
        rows, keys, longest = (sum(q_lens),), (sum(k_lens),), max(k_lens)
    else:
        batch, longest = rng.randint(1, 3), rng.choice([1, 5, 40, 130])
        rows, keys = (batch, rng.choice([1, 3, 20, 70, longest])), (batch, longest)
    if kind == "blocks":
        options["block_mask"] = _draw_block_mask(rng, heads, rows, keys)
    if kind == "BHSD":
        options["layout"] = "BHSD"
    tensors = [
        _normal(rng, *place, count, width, dtype=dtype)
        for place, count, width in ((rows, heads, size), (keys, kv_heads, size),
                                    (keys, kv_heads, v_size))
    ]  # fmt: skip
    if kind == "BHSD":
        tensors = [t.transpose(1, 2) for t in tensors]
    if rng.random() < 0.2:
        options["sinks"] = torch.randn(heads, generator=_generator(rng))
        options["sinks"][: rng.randint(0, 1)] = -math.inf
    shape = (*tensors[0].shape[:-1], v_size)
    d_out = torch.randn(shape if rng.random() < 0.7 else shape[-1:], generator=_generator(rng))
    d_out = d_out.to(dtype).expand(shape)
    d_lse = _maybe(rng, 0.6, torch.randn(shape[:-1], generator=_generator(rng)))

    def run(kind: torch.dtype, name: str) -> dict[str, Tensor]:
        leaves = {
            n: t.detach().to(kind).requires_grad_() for n, t in zip("qkv", tensors, strict=True)
        }
        given = dict(options)
        if "sinks" in given:
            leaves["sinks"] = given["sinks"].clone().requires_grad_()
            given["sinks"] = leaves["sinks"]
        out, lse = pagetile.attention(*(leaves[n] for n in "qkv"), **given, impl=name)
        total, weights = ([out], [d_out]) if d_lse is None else ([out, lse], [d_out, d_lse])
        weights = [g.to(t.dtype) for g, t in zip(weights, total, strict=True)]
        grads = torch.autograd.grad(total, list(leaves.values()), weights)
        found = {"out": out, "lse": lse}
        return found | {f"d_{n}": g for n, g in zip(leaves, grads, strict=True)}

    exact, found = run(torch.float64, "reference"), run(dtype, impl)
    scale = size**-0.5 if options["softmax_scale"] is None else abs(options["softmax_scale"])
    sharpness = 8 * (1 + scale * size + longest * (options["alibi_slopes"] is not None))
    # A gradient is a sum of products of sums: of its largest number it may lose more.
    return {
        n: _error(found[n], exact[n], torch.float32 if n == "lse" else dtype, sharpness)
        / (1 if n in ("out", "lse") else 8)
        for n in exact
    }


def _draw_block_mask(
    rng: random.Random, heads: int, rows: tuple[int, ...], keys: tuple[int, ...]
) -> pagetile.BlockMask:
    batch, *lens = *rows, keys[-1]
    sizes = rng.choice([1, 3, 16, 64, 128]), rng.choice([1, 5, 16, 32, 64, 128])
    shape = [-(-n // block) for n, block in zip(lens, sizes, strict=True)]
    shape = [rng.choice([1, batch]), rng.choice([1, heads]), *shape]
    mask = torch.rand(shape, generator=_generator(rng)) < rng.choice([0.0, 0.3, 0.7, 1.0])
    return pagetile.BlockMask(mask, *sizes)


def try_attention_scores(rng: random.Random, impl: str) -> Ratios:
    """``attention_scores`` of any strides."""
    dtype, size = rng.choice(dtypes_of(impl)), 8 * rng.randint(1, 12)
    sizes = rng.randint(1, 3), rng.randint(1, 4)
    q, k = (_normal(rng, *sizes, rng.randint(16, 90), size, dtype=dtype) for _ in "qk")
    scale = rng.choice([1.0, 0.25, 0.0, -2.0])
    found = pagetile.attention_scores(q, k, softmax_scale=scale, impl=impl)
    exact = q.double() @ k.double().mT * scale
    return {"scores": _error(found, exact, dtype, size)}


def try_merge_states(rng: random.Random, impl: str) -> Ratios:
    """``merge_states``; what saw no key holds NaN."""
    dtype, shape = rng.choice(dtypes_of(impl)), (rng.randint(0, 9), rng.randint(0, 9), 3)
    outs = _normal(rng, *shape, rng.choice([1, 5, 16, 40, 64]), dtype=dtype)
    lses = _normal(rng, *shape) * rng.choice([1, 30])
    empty = torch.rand(shape, generator=_generator(rng)) < 0.3
    outs = outs.masked_fill(empty[..., None], math.nan)
    lses = lses.masked_fill(empty, -math.inf)
    exact = pagetile.merge_states(outs.double(), lses, impl="reference")
    found = pagetile.merge_states(outs, lses, impl=impl)
    return {
        "out": _error(found.out, exact.out, dtype, 30),
        "lse": _error(found.lse, exact.lse, torch.float32),
    }


def try_window_attention(rng: random.Random, impl: str) -> Ratios:
    """``window_attention`` with any bias and mask, and all gradients."""
    window = tuple(rng.randint(1, 5) for _ in range(rng.randint(1, 3)))
    tokens = rng.choice([None, rng.randint(1, math.prod(window))]) or math.prod(window)
    heads, size, images = rng.randint(1, 4), rng.randint(1, 40), rng.randint(1, 3)
    dtype, num_masks = rng.choice(dtypes_of(impl)), rng.choice([1, 2, 4])
    windows = images * num_masks
    options: dict[str, Any] = {"mask_value": rng.choice([-100.0, -3.0, -math.inf, 2.0])}
    learned = {n: _normal(rng, windows, heads, tokens, size, dtype=dtype) for n in "qkv"}
    bias = rng.choice(["none", "table", "one", "many"])
    if bias == "table":
        learned["bias_table"] = _normal(rng, math.prod(2 * n - 1 for n in window), heads)
        options["rel_offsets"] = pagetile.rel_offsets(window, num_tokens=tokens)
    elif bias == "one":
        learned["bias"] = _normal(rng, heads, tokens, tokens)
    elif bias == "many":
        learned["bias"] = _normal(rng, rng.choice([1, num_masks]), heads, tokens, tokens)
    mask = rng.choice(["none", "regions", "float", "bool"])
    kind = torch.rand(num_masks, tokens, tokens, generator=_generator(rng))
    if mask == "regions":
        options["regions"] = (3 * kind[:, 0]).to(rng.choice([torch.uint8, torch.int64]))
    elif mask == "float":
        options["mask"] = kind.to(rng.choice([torch.float32, dtype]))
    elif mask == "bool":
        options["mask"] = kind < 0.6
    if rng.random() < 0.3 and size > 1:  # normalised rows of one number have no gradient
        learned["logit_scale"] = torch.linspace(0.5, 5.0, heads)
    else:
        options["softmax_scale"] = rng.choice([None, None, 0.5, 0.0])
    return _differentiate(rng, pagetile.window_attention, learned, options, dtype, impl)


def try_shifted_windows(rng: random.Random, impl: str) -> Ratios:
    """``shifted_window_attention``: padded, shifted and clamped maps of one to three axes."""
    axes, heads, size = rng.randint(1, 3), rng.randint(1, 3), rng.choice([4, 8, 16, 24])
    window = tuple(rng.randint(1, 4) for _ in range(axes))
    grid = [rng.randint(1, 9) for _ in window]
    dtype = rng.choice(dtypes_of(impl))
    shape = rng.randint(1, 2), *grid, 3, heads, size
    learned = {"qkv": _normal(rng, *shape, dtype=dtype)}
    if rng.random() < 0.5:
        learned["padding"] = _normal(rng, 3, heads, size)
    if rng.random() < 0.5:
        learned["bias_table"] = _normal(rng, math.prod(2 * n - 1 for n in window), heads)
    options = {"window": window, "shift": _maybe(rng, 0.6, [rng.randrange(n) for n in window])}
    return _differentiate(rng, pagetile.shifted_window_attention, learned, options, dtype, impl)


def _differentiate(
    rng: random.Random, function: Any, learned: dict[str, Tensor], options: dict[str, Any],
    dtype: torch.dtype, impl: str,
) -> Ratios:  # fmt: skip
    """Errors of a window operation's results and of all gradients."""
    results = ("out", "lse") if rng.random() < 0.6 else ("out",)
    generator = _generator(rng)

    def run(leaves: dict[str, Tensor], given: list[Tensor], name: str) -> dict[str, Tensor]:
        leaves = {n: t.detach().requires_grad_() for n, t in leaves.items()}
        result = function(**leaves, **options, impl=name)
        wanted = [getattr(result, n) for n in results]
        if not given:
            given += [torch.randn(t.shape, generator=generator).to(t.dtype) for t in wanted]
        weights = [g.to(t.dtype) for g, t in zip(given, wanted, strict=True)]
        grads = torch.autograd.grad(wanted, list(leaves.values()), weights, allow_unused=True)
        pairs = zip(leaves.items(), grads, strict=True)
        found = {f"d_{n}": torch.zeros_like(t) if g is None else g for (n, t), g in pairs}
        return {"out": result.out, "lse": result.lse} | found

    given: list[Tensor] = []
    found = run(learned, given, impl)
    exact = run({n: t.double() for n, t in learned.items()}, given, "reference")
    # Scores of float16 may be float16, and gradients are sums over the tokens of a window; that of
    # a scale is one over all windows.
    sharpness = 32 if dtype == torch.float32 else 1e4
    lse = exact["lse"]
    terms = {n: lse.numel() if n == "d_logit_scale" else lse.shape[-1] for n in exact}
    return {n: _error(found[n], exact[n], dtype, sharpness) / (1 + terms[n] ** 0.5) for n in exact}


# --- caches -------------------------------------------------------------------------------------


def _draw_caches(
    rng: random.Random, dtype: torch.dtype, shape: tuple[int, ...], sizes: tuple[int, int]
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Caches of one type with numbers in them, and the scales of 8 bits."""
    is_packed = dtype in LARGEST_CODE
    caches = []
    for size in sizes:
        numbers = torch.randn(*shape, size, generator=_generator(rng))
        poison = -128 if dtype == torch.int8 else math.nan
        caches.append(
            _spread((numbers * 20).to(dtype), poison, rng if rng.random() < 0.6 else None)
        )
    scales: dict[str, Tensor] = {}
    if is_packed:
        kind = rng.choice(["tensor", "head", "token"])
        wanted = {"tensor": (), "head": shape[2:], "token": shape}[kind]
        for name in ("k_scale", "v_scale"):
            numbers = torch.rand(wanted, generator=_generator(rng)) / 50 + 0.001
            scales[name] = _spread(numbers, math.nan, rng)
    return caches, scales


def _draw_slots(rng: random.Random, num_tokens: int, num_slots: int) -> Tensor:
    slots = rng.sample(range(num_slots), num_tokens)
    return torch.tensor([_maybe(rng, 0.8, slot, -1) for slot in slots], dtype=torch.int64)


def _copies(*tensors: Tensor) -> list[Tensor]:
    """The same numbers in tensors of the same strides."""
    made = []
    for tensor in tensors:
        memory = tensor.new_empty(0).set_(tensor.untyped_storage()).clone()
        made.append(memory.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()))
    return made


def try_write_kv(rng: random.Random, impl: str) -> Ratios:
    """``write_kv`` into every type of cache, with NaN and infinity among what is written."""
    cache_dtype = rng.choice([torch.float32, *_HALVES, *LARGEST_CODE])
    if impl == "triton" and cache_dtype in (torch.bfloat16, *_FLOAT8.values()):
        cache_dtype = torch.int8  # the interpreter rounds to these in another way
    dtype = rng.choice(dtypes_of(impl))
    shape = rng.randint(1, 5), rng.randint(1, 20), rng.randint(1, 4)
    sizes = 8 * rng.randint(1, 9), 8 * rng.randint(1, 9)
    caches, scales = _draw_caches(rng, cache_dtype, shape, sizes)
    num_tokens = rng.randint(0, shape[0] * shape[1])
    new = [_normal(rng, num_tokens, shape[2], size, dtype=dtype) for size in sizes]
    if num_tokens and rng.random() < 0.3:
        new[0][rng.randrange(num_tokens), 0, 3] = rng.choice([math.nan, math.inf, -math.inf, 6e4])
    slots = _draw_slots(rng, num_tokens, shape[0] * shape[1])
    others = _copies(*caches, *scales.values())
    pagetile.write_kv(new[0], new[1], caches[0], caches[1], slots, **scales, impl=impl)
    there = dict(zip(scales, others[2:], strict=True))
    k_cache, v_cache = others[:2]
    pagetile.write_kv(new[0], new[1], k_cache, v_cache, slots, **there, impl="reference")
    return {
        "caches": _is_same(caches, others[:2]),
        "scales": _is_same(scales.values(), others[2:]),
    }


def try_copy_blocks(rng: random.Random, impl: str) -> Ratios:
    """``copy_blocks`` in a cache, and between two."""
    dtype = rng.choice([torch.float32, torch.float16, torch.int8, torch.int64])
    shape = [rng.randint(1, 9), *[rng.randint(1, 6) for _ in range(rng.randint(0, 3))]]
    caches: list[Any] = []
    expected: list[Any] = []
    for _ in range(rng.randint(1, 3)):
        numbers = torch.randint(0, 100, (2, *shape), generator=_generator(rng)).to(dtype)
        pair = numbers[0].clone(), numbers[1].clone()
        same = _copies(*pair)
        is_pair = rng.random() < 0.5
        caches.append(pair if is_pair else pair[0])
        expected.append(tuple(same) if is_pair else same[0])
    count = rng.randint(0, shape[0])
    pairs = (
        torch.tensor([[rng.randrange(shape[0]), to] for to in rng.sample(range(shape[0]), count)])
        .view(-1, 2)
        .long()
    )
    pagetile.copy_blocks(caches, pairs, impl=impl)
    pagetile.copy_blocks(expected, pairs, impl="reference")
    flat = [[t for c in all_ for t in (c if isinstance(c, tuple) else (c,))]
            for all_ in (caches, expected)]  # fmt: skip
    return {"caches": _is_same(*flat)}


def try_vllm_attention(rng: random.Random, impl: str) -> Ratios:
    """Run one of vLLM's two attention operators, block-sparse or not, against float64 scores."""
    dtype, packed = rng.choice(dtypes_of(impl)), _maybe(rng, 0.3, rng.choice(list(_FLOAT8)))
    kv_heads = rng.choice([1, 2, 3])
    lengths = [rng.choice([rng.randint(1, 90), rng.randint(1, 700)]) for _ in range(3)]
    case = PagedCase(
        (1,) * 3, tuple(lengths), kv_heads * rng.choice([1, 2, 5, 7, 40]), kv_heads,
        16 * rng.randint(1, 8), block_size=rng.choice([8, 16, 32, 64, 128, 256]), dtype=dtype,
        kv_dtype=None if packed is None else _FLOAT8[packed],
        scales=None if packed is None else "tensor", seed=rng.randrange(1 << 31),
    )  # fmt: skip
    inputs = make_inputs(case)
    options, batch = inputs.options, inputs.batch
    keys, values = vllm_ops.pack_cache(inputs.k_cache, inputs.v_cache)
    if packed is not None:
        keys, values = keys.view(torch.uint8), values.view(torch.uint8)
    q = _normal(rng, batch.num_seqs, case.num_heads, case.head_size, dtype=dtype)
    out = _spread(torch.full_like(q, math.nan, memory_format=torch.contiguous_format), 7.0, rng)
    slopes = _maybe(rng, 0.3, torch.randn(case.num_heads, generator=_generator(rng)) / 8)
    sparse: dict[str, Any] = {
        "tp_rank": rng.randint(0, 2), "blocksparse_local_blocks": rng.randint(0, 3),
        "blocksparse_vert_stride": rng.choice([0, 1, 2, 3, 5]),
        "blocksparse_block_size": case.block_size * rng.choice([1, 2, 4]),
        "blocksparse_head_sliding_step": rng.randint(-2, 2),
    }  # fmt: skip
    one = torch.ones(1)
    rest = (
        q, keys, values, kv_heads, 0.2, batch.block_tables, batch.seq_lens, case.block_size,
        batch.max_seq_len, slopes, packed or "auto", options.get("k_scale", one),
        options.get("v_scale", one),
    )  # fmt: skip
    parts = -(-batch.max_seq_len // 512)
    sums, tops = (torch.full((*q.shape[:2], parts), math.nan) for _ in range(2))
    partial = torch.full((*q.shape[:2], parts, q.shape[2]), math.nan, dtype=dtype)
    if rng.random() < 0.5:
        vllm_ops.paged_attention_v1(out, *rest, **sparse)
    else:
        vllm_ops.paged_attention_v2(out, sums, tops, partial, *rest, **sparse)
    exact = _attend_by_blocks(case, inputs, q, slopes, sparse)
    sharpness = 8 * (1 + 0.2 * case.head_size) + (0 if slopes is None else max(lengths))
    return {"out": _error(out, exact, dtype, sharpness)}


def _attend_by_blocks(
    case: PagedCase, inputs: Any, q: Tensor, slopes: Tensor | None, sparse: dict[str, int]
) -> Tensor:
    """Attention of one token a sequence in float64; a block's first key says who sees it."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    group, step = case.num_heads // case.num_kv_heads, sparse["blocksparse_head_sliding_step"]
    head = torch.arange(case.num_heads)
    offset = (sparse["tp_rank"] * case.num_heads + head) * step + 1
    if step < 0:
        offset = (sparse["tp_rank"] * case.num_kv_heads + head // group) * -step + 1
    for seq, length in enumerate(inputs.batch.seq_lens.tolist()):
        if not length:
            continue
        blocks = inputs.batch.block_tables[seq, : -(-length // case.block_size)].long()
        k, v = (
            cache[blocks].flatten(0, 1)[:length].double().repeat_interleave(group, 1)
            * float(inputs.options.get(name, 1.0))
            for cache, name in ((inputs.k_cache, "k_scale"), (inputs.v_cache, "v_scale"))
        )
        scores = torch.einsum("hd,khd->hk", q[seq].double(), k) * 0.2
        key = torch.arange(length)
        if slopes is not None:
            scores = scores + slopes.double()[:, None] * (key - length + 1)
        if sparse["blocksparse_vert_stride"] > 1:
            size = sparse["blocksparse_block_size"]
            block = key // case.block_size * case.block_size // size
            is_near = block > (length - 1) // size - sparse["blocksparse_local_blocks"]
            is_far = (block + offset[:, None]) % sparse["blocksparse_vert_stride"] == 0
            scores = scores.masked_fill(~(is_far | is_near), -math.inf)
        out[seq] = torch.einsum("hk,khd->hd", scores.softmax(-1).nan_to_num(0.0), v)
    return out


def try_vllm_cache(rng: random.Random, impl: str) -> Ratios:
    """``reshape_and_cache`` against ``write_kv``'s reference and a conversion."""
    dtype = rng.choice(dtypes_of(impl))
    packed = _maybe(rng, 0.4, rng.choice(list(_FLOAT8))) if impl != "triton" else None
    cache_dtype = dtype if packed is None else _FLOAT8[packed]
    shape = rng.randint(1, 4), rng.choice([8, 16, 32]), rng.randint(1, 3), 16 * rng.randint(1, 5)
    caches = [(torch.randn(shape, generator=_generator(rng))).to(cache_dtype) for _ in "kv"]
    tokens = rng.randint(0, shape[0] * shape[1])
    new = [_normal(rng, tokens, *shape[2:], dtype=dtype) for _ in "kv"]
    slots = _draw_slots(rng, tokens, shape[0] * shape[1])[: max(0, tokens - rng.randint(0, 2))]
    scales = [torch.tensor(0.01 + rng.random() / 9) for _ in "kv"]
    there = vllm_ops.pack_cache(*caches)
    view = [t if packed is None else t.view(torch.uint8) for t in there]
    written = new[0], new[1], view[0], view[1], slots, packed or "auto", scales[0], scales[1]
    vllm_ops.reshape_and_cache(*written)
    named = {} if packed is None else dict(zip(("k_scale", "v_scale"), scales, strict=True))
    k, v = (t[: len(slots)] for t in new)
    pagetile.write_kv(k, v, caches[0], caches[1], slots, **named, impl="reference")
    return {"caches": _is_same(there, vllm_ops.pack_cache(*caches))}


# --- fused layers: by Triton only ---------------------------------------------------------------


def _norm(rng: random.Random, size: int, dtype: torch.dtype) -> Norm:
    weight = torch.randn(size, generator=_generator(rng)).to(dtype)
    return Norm(weight, rng.choice([1e-5, 1e-2]), rng.choice(KINDS))


def _to64(norm: Norm | None) -> Norm | None:
    return None if norm is None else norm._replace(weight=norm.weight.double())


def try_rotary_write(rng: random.Random, impl: str) -> Ratios:
    """``rotate_and_write`` into caches of 16 bits, float32 and int8."""
    dtype, kinds = rng.choice(dtypes_of(impl)), rng.choice(["plain", "int8"])
    size, v_size = 8 * rng.randint(1, 12), 8 * rng.randint(1, 12)
    heads = Heads(rng.randint(1, 7), rng.randint(1, 3), size, v_size)
    shape = rng.randint(1, 4), rng.randint(1, 9), heads.num_kv_heads
    tokens = rng.randint(0, shape[0] * shape[1])
    cache_dtype = torch.int8 if kinds == "int8" else dtype
    caches, scales = _draw_caches(rng, cache_dtype, shape, (size, v_size))
    heads = heads._replace(
        q_norm=_maybe(rng, 0.4, _norm(rng, size, dtype)),
        k_norm=_maybe(rng, 0.4, _norm(rng, size, dtype)), is_shared=rng.random() < 0.5,
    )  # fmt: skip
    rotated = 2 * rng.randint(1, size // 2)
    angles: list[Any] = [None, None]
    if rng.random() < 0.8:
        width = rotated // 2 if heads.is_shared else rotated
        angles = [torch.rand(1, tokens, width, generator=_generator(rng)).to(dtype) for _ in "cs"]
    wide = torch.randn(tokens, heads.width + 8, generator=_generator(rng)).to(dtype)
    qkv = wide[:, : heads.width] if rng.random() < 0.5 else wide[:, : heads.width].contiguous()
    slots = _draw_slots(rng, tokens, shape[0] * shape[1])
    others = _copies(*caches, *scales.values())
    cos, sin = angles
    k_cache, v_cache = caches
    found = rotate_and_write(qkv, cos, sin, heads, k_cache, v_cache, slots, **scales, impl=impl)
    there = dict(zip(scales, others[2:], strict=True))
    k_cache, v_cache = others[:2]
    exact = rotate_and_write(
        qkv, cos, sin, heads, k_cache, v_cache, slots, **there, impl="reference"
    )
    ratios = {"q": _error(found, exact, dtype)}
    for name, a, b in zip("kv", caches, others[:2], strict=True):
        # Numbers may be rounded to the neighbouring code.
        errors = (a.float() - b.float()).abs().nan_to_num(0.0)
        off = float(errors.max()) if errors.numel() else 0.0
        ratios[name] = (
            off / 1.5 if kinds == "int8" else _error(a.nan_to_num(7), b.nan_to_num(7), dtype)
        )
    return ratios


def try_fused_rows(rng: random.Random, impl: str) -> Ratios:
    """Norms, residuals, gates, embeddings and rotary angles, one of them."""
    dtype, size = rng.choice(dtypes_of(impl)), rng.choice([1, 3, 8, 24, 100, 256])
    shape = *[rng.randint(1, 5) for _ in range(rng.randint(1, 2))], size
    x, y = (_normal(rng, *shape, dtype=dtype) for _ in "xy")
    match rng.choice(["norm", "add", "gate", "take", "rotate"]):
        case "norm":
            norm = _norm(rng, size, dtype)
            found = rms_norm(x, norm.weight, eps=norm.eps, kind=norm.kind, impl=impl)
            exact = rms_norm(
                x.double(), norm.weight.double(), eps=norm.eps, kind=norm.kind, impl="reference"
            )
            return {"rms_norm": _error(found, exact, dtype)}
        case "add":
            x, y = x.contiguous(), y.contiguous()
            norms = {n: _maybe(rng, 0.6, _norm(rng, size, dtype)) for n in ("before", "after")}
            parts = rng.randint(0, 3)
            if parts:
                y = torch.randn(parts, *shape, generator=_generator(rng))
            made = add_norm(x, y, **norms, impl=impl)
            whole = y.double().sum(0).to(dtype).double() if parts else y.double()
            wider = {n: _to64(norm) for n, norm in norms.items()}
            wanted = add_norm(x.double(), whole, **wider, impl="reference")
            pairs = zip(("sum", "normed"), made, wanted, strict=True)
            return {n: _error(a, b, dtype) for n, a, b in pairs if a is not None and b is not None}
        case "gate":
            both, name = torch.cat([x, y], -1), rng.choice(ACTIVATIONS)
            exact = gated_activation(both.double(), name, impl="reference")
            return {"gate": _error(gated_activation(both, name, impl=impl), exact, dtype)}
        case "take":
            table = x.reshape(-1, size).contiguous()
            ids = torch.randint(0, len(table), (rng.randint(0, 9),), generator=_generator(rng))
            return {"take": _is_same([take_rows(table, ids, impl=impl)], [table[ids]])}
    half, tokens = rng.randint(1, 40), rng.randint(0, 9)
    is_shared, rest = rng.random() < 0.5, rng.choice([0, 3, 16])
    q, k = (_normal(rng, 1, rng.randint(1, 5), tokens, 2 * half + rest, dtype=dtype) for _ in "qk")
    width = half if is_shared else 2 * half
    angles = [_normal(rng, 1, tokens, width, dtype=dtype) for _ in "cs"]
    got = rotate(q, k, *angles, is_shared=is_shared, impl=impl)
    wide = [t.double() for t in (q, k, *angles)]
    right = rotate(*wide, is_shared=is_shared, impl="reference")
    return {n: _error(a, b, dtype) for n, a, b in zip("qk", got, right, strict=True)}


def try_small_linear(rng: random.Random, impl: str) -> Ratios:
    """``small_linear`` and ``partial_products``."""
    dtype, rows = rng.choice(dtypes_of(impl)), rng.choice([1, 2, 3, 4, 5, 17])
    size, columns = 8 * rng.randint(1, 40), rng.randint(1, 90)
    if dtype == torch.float32:
        rows = min(rows, 4)
    x = torch.randn(rows, size + 8, generator=_generator(rng)).to(dtype)[:, :size]

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=_generator(rng)).to(dtype)

    if rng.random() < 0.3 and dtype != torch.float32:
        x, weight = draw(rows, 64 * rng.randint(1, 8)), None
        weight = draw(columns, x.shape[1])
        found = partial_products(x, weight, impl=impl).sum(0)
        return {"parts": _error(found, x.double() @ weight.double().T, dtype, size)}
    activation = rng.choice(["", "", *ACTIVATIONS])
    gates = 2 if activation else 1
    weight = draw(gates * columns, size) / size**0.5
    options: dict[str, Any] = {
        "bias": _maybe(rng, 0.4, draw(gates * columns)),
        "norm": _maybe(rng, 0.4, _norm(rng, size, dtype)) if rows <= 4 else None,
        "residual": _maybe(rng, 0.4, draw(rows, columns)),
    }
    wide: dict[str, Any] = {n: t if t is None else _to64(t) if n == "norm" else t.double()
                            for n, t in options.items()}  # fmt: skip
    found = small_linear(x, weight, **options, activation=activation, impl=impl)
    exact = small_linear(
        x.double(), weight.double(), **wide, activation=activation, impl="reference"
    )
    return {"product": _error(found, exact, dtype, size)}


def try_moe(rng: random.Random, impl: str) -> Ratios:
    """``moe_experts`` with weights by rows or by columns."""
    dtype, (tokens, count) = rng.choice(dtypes_of(impl)), (rng.randint(0, 9), rng.randint(1, 6))
    hidden, inner, top_k = 8 * rng.randint(1, 5), 8 * rng.randint(1, 5), rng.randint(1, count)

    def draw(*shape: int) -> Tensor:
        numbers: Tensor = torch.randn(shape, generator=_generator(rng)) / math.sqrt(shape[-1])
        return numbers.to(dtype)

    if rng.random() < 0.5:
        gate, up = draw(count, 2 * inner, hidden).chunk(2, 1)
    else:
        gate, up = (
            draw(count, hidden, 2 * inner).view(count, hidden, inner, 2).transpose(1, 2).unbind(3)
        )
    biases: tuple[Tensor, ...] = ()
    if rng.random() < 0.5:
        biases = draw(count, inner), draw(count, inner), draw(count, hidden)
    expert = Expert(gate, up, draw(count, hidden, inner), *biases)
    chosen = torch.rand(tokens, count, generator=_generator(rng)).argsort(1)[:, :top_k].contiguous()
    weights = torch.rand(tokens, top_k, generator=_generator(rng))
    options: dict[str, Any] = {
        "activation": rng.choice(["silu", "clamped"]),
        "alpha": 1.7,
        "limit": 1.5,
    }
    x = draw(tokens, hidden) * hidden**0.5
    wide = Expert(
        expert.gate.double(),
        expert.up.double(),
        expert.down.double(),
        *[t.double() for t in biases],
    )
    found = moe_experts(x, chosen, weights, expert, **options, impl=impl)
    exact = moe_experts(x.double(), chosen, weights, wide, **options, impl="reference")
    return {"out": _error(found, exact, dtype, hidden)}


def try_instance_norm(rng: random.Random, impl: str) -> Ratios:
    """``instance_norm`` and its gradients."""
    dtype = torch.float32
    shape = rng.randint(1, 2), rng.randint(1, 4), *[rng.randint(2, 12) for _ in range(2)]
    learned = {"x": _normal(rng, *shape, dtype=dtype)}
    options: dict[str, Any] = {"negative_slope": rng.choice([0.01, 0.2, 1.0])}
    if rng.random() < 0.6:
        learned["residual"] = _normal(rng, *shape, dtype=dtype)
        options["residual_eps"] = _maybe(rng, 0.5, 1e-4)
    seed = rng.randrange(1 << 31)

    def run(kind: torch.dtype, name: str) -> list[Tensor]:
        leaves = [t.detach().to(kind).requires_grad_() for t in learned.values()]
        out = instance_norm(*leaves, **options, impl=name)
        given = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(kind)
        return [out, *torch.autograd.grad(out, leaves, given)]

    pairs = zip(("out", *learned), run(dtype, impl), run(torch.float64, "reference"), strict=True)
    return {name: _error(a, b, dtype, 100) for name, a, b in pairs}


OPERATIONS: dict[str, tuple[Trial, tuple[str, ...]]] = {
    "attention": (try_attention, ("cpu", "triton")),
    "attention_scores": (try_attention_scores, ("cpu",)),
    "copy_blocks": (try_copy_blocks, ("cpu", "triton")),
    "fused_rows": (try_fused_rows, ("triton",)),
    "instance_norm": (try_instance_norm, ("triton",)),
    "merge_states": (try_merge_states, ("cpu", "triton")),
    "moe": (try_moe, ("triton",)),
    "rotary_write": (try_rotary_write, ("triton",)),
    "shifted_windows": (try_shifted_windows, ("cpu", "triton")),
    "small_linear": (try_small_linear, ("triton",)),
    "vllm_attention": (try_vllm_attention, ("cpu", "triton")),
    "vllm_cache": (try_vllm_cache, ("cpu", "triton")),
    "window_attention": (try_window_attention, ("cpu", "triton")),
    "write_kv": (try_write_kv, ("cpu", "triton")),
}
"""Trials by their names, and the implementations that run without a GPU."""
