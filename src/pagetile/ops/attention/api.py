"""The public operation: contract and defaults."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import torch
from torch import Tensor

from ...device import DeviceInfo
from ...errors import DTypeError, ShapeError, UnsupportedError, plural
from ...shapes import check_tensors, given
from ...tiles.state import AttentionOutput
from ..attention_checks import default_scale, settle_scale, whole_window
from ..dispatch import explain
from ..eager import autocast_type
from .block_mask import BlockMask
from .checks import check
from .operator import IMPLEMENTATIONS, attend
from .problem import Lengths, Options


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_query_len: int | None = None,
    max_seq_len: int | None = None,
    causal: bool = False,
    softmax_scale: float | None = None,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    block_mask: BlockMask | None = None,
    layout: str | None = None,
    impl: str = "auto",
) -> AttentionOutput:
    """Tiled attention over dense or ragged keys and values, forward and backward.

    No score is ever stored: memory grows with the tokens, not with their square. The last query
    of a sequence stands at its last key, so for 2 queries and 5 keys ``causal`` is (1 = visible):

        1 1 1 1 0
        1 1 1 1 1

    A score is ``q · k * softmax_scale``, then capped, then biased, then masked. Differentiable in
    ``q``, ``k``, ``v`` and ``sinks``, once, through ``out`` and ``lse``. The same inputs give the
    same bits; gradients on Hopper do so under ``torch.use_deterministic_algorithms(True)``, and
    are faster without. CUDA graphs with calls on Hopper share a counter: they must not be replayed
    at the same time. It is a custom operator: ``torch.compile`` and checkpointing do not look into
    it. Under autocast q, k and v are cast as for torch's own attention.

    Args:
        q: ``[batch, query_len, num_heads, head_size]``, or ``[num_tokens, num_heads, head_size]``
            with ``cu_seqlens_q``. float32, float16, bfloat16, or float64 on the reference. Last
            dimension contiguous, here and below; other strides are free.
        k: ``[batch, seq_len, num_kv_heads, head_size]``, or ``[num_keys, num_kv_heads,
            head_size]`` with ``cu_seqlens_k``. ``head_size`` a multiple of 8 up to 512,
            ``num_kv_heads`` any divisor of ``num_heads``.
        v: As ``k``, but of ``v_head_size``.
        cu_seqlens_q: int32 ``[num_seqs + 1]``; where each sequence's queries start in ``q``.
        cu_seqlens_k: The same of its keys. ``None``: as ``cu_seqlens_q``.
        max_query_len: At least the most queries of a sequence. ``None`` is the number of all
            queries, for which a GPU starts more programs than are needed.
        max_seq_len: At least the most keys of a sequence. ``None``: of all keys, or
            ``max_query_len`` without ``cu_seqlens_k``.
        causal: Whether a query sees only keys at or before its own position.
        softmax_scale: Multiplies ``q · k``. ``None`` is ``head_size ** -0.5``; 0.0 means 0.0.
        sliding_window: Number of visible keys up to the query's own, which counts; those after it
            are hidden by ``causal`` only. ``None``: all.
        logits_soft_cap: Scores become ``cap * tanh(score / cap)``. ``None``: no cap.
        alibi_slopes: ``[num_heads]``; adds ``slope * (key position - query position)``.
        sinks: ``[num_heads]``; one more logit in each head's softmax, with no value. It counts in
            ``lse``.
        block_mask: Which blocks of queries see which blocks of keys, of a dense batch; see
            ``BlockMask``. ``None``: all. Tiles of hidden blocks are not computed.
        layout: Order of the dimensions of a dense batch: ``"BSHD"`` is ``[batch, sequence, heads,
            size]``, as above; ``"BHSD"`` is ``[batch, heads, sequence, size]``, as torch's
            ``scaled_dot_product_attention`` has it, and the results then have it, too. ``None``:
            BSHD, and a warning where the shapes look like BHSD.
        impl: ``"auto"``, or one of ``"hopper"``, ``"triton"``, ``"cpu"``, ``"reference"``: a named
            one runs or raises.

    Returns:
        ``AttentionOutput(out, lse)``; ``out`` like ``q`` with ``v_head_size``, ``lse`` float32
        like ``q`` without its last dimension, natural logarithm. A query that sees no key (and no
        sink) has ``out`` 0 and ``lse`` -inf.

    Raises:
        ShapeError: Sizes disagree or are out of range; the message names the arguments.
        DTypeError: An argument has an element type that it does not take.
        UnsupportedError: The named ``impl`` cannot run this, or a gradient is wanted that is not
            implemented; the message says why.

    Examples:
        >>> q, k, v = torch.randn(3, 2, 100, 8, 64).unbind()
        >>> attention(q, k, v, causal=True).out.shape
        torch.Size([2, 100, 8, 64])

        Two sequences, of 30 and 70 tokens, and a gradient:

        >>> q, k, v = torch.randn(3, 100, 8, 64, requires_grad=True).unbind()
        >>> starts = torch.tensor([0, 30, 100], dtype=torch.int32)
        >>> result = attention(q, k, v, cu_seqlens_q=starts, max_query_len=70)
        >>> result.out.sum().backward()
    """
    lengths = Lengths(cu_seqlens_q, cu_seqlens_k, max_query_len, max_seq_len)
    q, k, v, lengths, options = _normalize(
        q, k, v, lengths, softmax_scale=softmax_scale, sliding_window=sliding_window,
        causal=causal, logits_soft_cap=logits_soft_cap, alibi_slopes=alibi_slopes, sinks=sinks,
        block_mask=block_mask, layout=layout,
    )  # fmt: skip
    out, lse = attend(
        q, k, v, lengths.cu_seqlens_q, lengths.cu_seqlens_k, options.alibi_slopes, options.sinks,
        None if block_mask is None else block_mask.mask,
        lengths.max_query_len, lengths.max_seq_len, options.softmax_scale, options.causal,
        options.sliding_window, options.logits_soft_cap,
        *((0, 0) if block_mask is None else (block_mask.block_q, block_mask.block_k)), impl,
    )  # fmt: skip
    if layout == "BHSD":
        out, lse = out.transpose(1, 2), lse.transpose(1, 2)
    return AttentionOutput(out, lse)


def explain_attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> str:
    """Return which implementations can run a call, one a line, in the order of ``impl="auto"``.

    Args:
        q: As for ``attention``.
        k: As for ``attention``.
        v: As for ``attention``.
        **options: The keyword arguments of ``attention``; ``impl`` is ignored.

    Examples:
        >>> q = torch.zeros(1, 5, 4, 64)
        >>> print(explain_attention(q.double(), q.double(), q.double()))
        hopper: no, the tensors are on cpu
        triton: no, the tensors are on cpu
        cpu: no, q is float64; float32, float16 and bfloat16 run
        reference: yes
    """
    options.pop("impl", None)
    known = inspect.signature(attention).parameters
    for name in options:
        if name not in known:
            raise TypeError(f"explain_attention() got an unexpected keyword argument {name!r}")
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_query_len", "max_seq_len")
    lengths = Lengths(*(options.pop(name, None) for name in names))
    problem = check(*_normalize(q, k, v, lengths, **options))
    return explain(__package__, IMPLEMENTATIONS, problem, DeviceInfo.of(q.device))


def _normalize(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Lengths,
    *,
    softmax_scale: float | None = None,
    sliding_window: int | None = None,
    layout: str | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor, Tensor, Lengths, Options]:
    """Bring tensors to BSHD, fill in defaults, and apply autocast."""
    slopes, sinks = others.get("alibi_slopes"), others.get("sinks")
    starts = given(cu_seqlens_q=lengths.cu_seqlens_q, cu_seqlens_k=lengths.cu_seqlens_k)
    check_tensors(q=q, k=k, v=v, **starts, **given(alibi_slopes=slopes, sinks=sinks))
    if slopes is not None and slopes.requires_grad and torch.is_grad_enabled():
        raise UnsupportedError(
            "alibi_slopes requires a gradient, which attention does not compute: pass "
            "alibi_slopes.detach()"
        )
    block_mask = others.get("block_mask")
    if block_mask is not None and not isinstance(block_mask, BlockMask):
        raise DTypeError(
            f"block_mask is a {type(block_mask).__name__}, expected pagetile.BlockMask(mask, "
            "block_q, block_k)"
        )
    q, k, v = _as_bshd(q, k, v, lengths, layout)
    dtype = autocast_type(q)
    if dtype is not None:
        q, k, v = (t.to(dtype) if t.dtype != torch.float64 else t for t in (q, k, v))
    window = whole_window(sliding_window)
    scale = settle_scale(softmax_scale, default_scale(q))
    options = Options(scale, sliding_window=window, **others)
    return q, k, v, _share_starts(lengths), options


def _as_bshd(
    q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, layout: str | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Views in ``[batch, sequence, heads, size]``; warn where these already look like BHSD."""
    if layout not in (None, "BSHD", "BHSD"):
        raise ShapeError(f"layout is {layout!r}, expected 'BSHD' or 'BHSD'")
    if layout == "BHSD":
        if lengths.cu_seqlens_q is not None:
            raise ShapeError(
                "layout is 'BHSD' but cu_seqlens_q is given: a ragged batch is [num_tokens, heads, "
                "size]; leave layout out"
            )
        for name, tensor in {"q": q, "k": k, "v": v}.items():
            if tensor.dim() != 4:
                raise ShapeError(
                    f"{name} has {plural(tensor.dim(), 'dimension')} {list(tensor.shape)}, "
                    "expected 4 with layout='BHSD': [batch heads sequence size]"
                )
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    is_dense = lengths.cu_seqlens_q is None and q.dim() == k.dim() == 4
    if layout is None and is_dense and not torch.compiler.is_compiling() and _is_bhsd(q, k):
        warnings.warn(
            f"attention reads q {list(q.shape)} as [batch, sequence, heads, size], which makes "
            f"{q.shape[2]} heads of {q.shape[1]} queries: if it is [batch, heads, sequence, size], "
            'pass layout="BHSD"; if not, layout="BSHD" silences this warning',
            stacklevel=4,
        )
    return q, k, v


def _is_bhsd(q: Tensor, k: Tensor) -> bool:
    """Whether there are more heads than queries and keys, and more than most models have."""
    heads, length = min(q.shape[2], k.shape[2]), max(q.shape[1], k.shape[1])
    return heads > max(length, _MANY_HEADS) and q.shape[2] % k.shape[2] == 0


_MANY_HEADS = 32


def _share_starts(lengths: Lengths) -> Lengths:
    """Without starts of their own, keys are where queries are."""
    if lengths.cu_seqlens_q is None or lengths.cu_seqlens_k is not None:
        return lengths
    longest = lengths.max_query_len if lengths.max_seq_len is None else lengths.max_seq_len
    return Lengths(lengths.cu_seqlens_q, lengths.cu_seqlens_q, lengths.max_query_len, longest)
