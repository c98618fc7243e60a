"""pagetile's dense operations beside PyTorch's: problems for ``compare``."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ..ops.attention import attention
from ..ops.attention_scores import attention_scores
from ..shapes import dtype_name
from .attention_io import AttentionShape
from .roofline import Work, attention_work
from .side_by_side import Contest

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
}
ROWS = 1024  # of scores in float64 at a time


def attention_contest(
    shape: AttentionShape, *, dtype: torch.dtype, device: torch.device
) -> Contest:
    """``pagetile.attention`` beside eager attention and PyTorch's fused kernels.

    Examples:
        >>> shape = AttentionShape(20, 8, num_heads=4, num_kv_heads=2, causal=True)
        >>> contest = attention_contest(shape, dtype=torch.float32, device=torch.device("cpu"))
        >>> list(contest.contestants)
        ['pagetile.attention', 'eager', 'PyTorch SDPA']
    """
    random = torch.Generator(device).manual_seed(0)
    q, k, v = (
        torch.randn(shape.batch, length, heads, size, dtype=dtype, device=device, generator=random)
        for length, heads, size in (
            (shape.query_len, shape.num_heads, shape.head_size),
            (shape.key_len, shape.num_kv_heads, shape.head_size),
            (shape.key_len, shape.num_kv_heads, shape.v_head_size),
        )
    )
    hidden = _hidden(shape, device)
    group = shape.num_heads // shape.num_kv_heads
    wide = [t.transpose(1, 2).repeat_interleave(n, 1) for t, n in ((q, 1), (k, group), (v, group))]
    is_square = shape.query_len == shape.key_len and shape.sliding_window is None
    options = (
        {"is_causal": shape.causal}
        if is_square
        else {"attn_mask": None if hidden is None else ~hidden}
    )

    def own() -> Tensor:
        return attention(
            q, k, v, causal=shape.causal, sliding_window=shape.sliding_window
        ).out.transpose(1, 2)

    def fused() -> Tensor:
        return scaled_dot_product_attention(wide[0], wide[1], wide[2], **options)

    return Contest(
        f"{shape.batch} x {shape.query_len:,} queries, {shape.key_len:,} keys, "
        f"{shape.num_heads}/{shape.num_kv_heads} heads of {shape.head_size}"
        f"{', causal' * shape.causal}, {dtype_name(dtype)}",
        {
            "pagetile.attention": own,
            "eager": lambda: _eager(wide[0], wide[1], wide[2], hidden),
            "PyTorch SDPA": fused,
            **on_each_backend(fused, device),
        },
        (torch.stack([_exact(a, b, c, hidden) for a, b, c in zip(*wide, strict=True)]),),
        attention_work(shape, dtype=dtype_name(dtype)),
        ("eager and SDPA get keys and values repeated for every query head",) * (group > 1),
    )


def scores_contest(
    batch: int,
    num_heads: int,
    num_tokens: int,
    head_size: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> Contest:
    """``pagetile.attention_scores`` beside PyTorch's products.

    Examples:
        >>> contest = scores_contest(2, 3, 7, 8, dtype=torch.float32, device=torch.device("cpu"))
        >>> contest.expected[0].shape, contest.work.bytes  # q, k and the scores, once
        (torch.Size([2, 3, 7, 7]), 3864)
    """
    random = torch.Generator(device).manual_seed(0)
    sizes = (2, batch, num_heads, num_tokens, head_size)
    q, k = torch.randn(sizes, dtype=dtype, device=device, generator=random).unbind()
    elements = 2 * q.numel() + q.numel() // head_size * num_tokens
    flops = 2 * q.numel() * num_tokens
    return Contest(
        f"{batch:,} x {num_heads} heads of {num_tokens} tokens x {head_size}, {dtype_name(dtype)}",
        {
            "pagetile.attention_scores": lambda: attention_scores(q, k),
            "torch.matmul": lambda: q @ k.mT,
            "torch.einsum": lambda: torch.einsum("bhid,bhjd->bhij", q, k),
        },
        (q.double() @ k.double().mT,),
        Work(elements * dtype.itemsize, flops, 0, dtype_name(dtype)),
    )


def on_each_backend(
    call: Callable[[], Tensor], device: torch.device
) -> dict[str, Callable[[], Tensor]]:
    """The same call on each of PyTorch's GPU kernels."""
    if device.type != "cuda":
        return {}

    def on(backend: SDPBackend) -> Tensor:
        with sdpa_kernel(backend):
            return call()

    return {f"PyTorch SDPA, {name}": partial(on, backend) for name, backend in BACKENDS.items()}


def _hidden(shape: AttentionShape, device: torch.device) -> Tensor | None:
    """True where a query does not see a key; ``None`` if every query sees every key."""
    if not shape.causal and shape.sliding_window is None:
        return None
    keys = torch.arange(shape.key_len, device=device)
    positions = keys.new_tensor(range(shape.key_len - shape.query_len, shape.key_len))
    distance = keys - positions[:, None]
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if shape.causal:
        hidden |= distance > 0
    if shape.sliding_window is not None:
        hidden |= distance <= -shape.sliding_window
    return hidden


def _eager(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None) -> Tensor:
    """Attention with its scores in memory; rows that see no key give 0."""
    scores = torch.matmul(q * q.shape[-1] ** -0.5, k.mT)
    if hidden is None:
        return torch.matmul(scores.softmax(-1), v)
    weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
    return torch.matmul(weights.masked_fill(hidden.all(-1, keepdim=True), 0.0), v)


def _exact(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None) -> Tensor:
    """The same in float64, some rows of one head at a time."""
    wide = q.double(), k.double(), v.double()
    pieces = [slice(m0, m0 + ROWS) for m0 in range(0, q.shape[1], ROWS)]
    masks = [None if hidden is None else hidden[rows] for rows in pieces]
    heads = [
        torch.cat(
            [
                _eager(head_q[rows], head_k, head_v, mask)
                for rows, mask in zip(pieces, masks, strict=True)
            ]
        )
        for head_q, head_k, head_v in zip(*wide, strict=True)
    ]
    return torch.stack(heads)
