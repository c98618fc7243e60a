"""The float64 result of paged attention, and the tolerance of other results.

The tolerance comes from the data: an implementation's error may be twice that of eager torch on
the same inputs in the same element type, plus a bound of rounding errors, since eager torch may be
exact by chance::

    out:  2 · max |eager − oracle| + 2 u · (max |out| + spread) + 4 u32 · (1 + scores) · spread
    lse:  2 · max |eager32 − oracle| + 4 u32 · (1 + scores)

``u`` is half an ulp relative to 1 in the element type, ``u32`` in float32. ``spread`` is the
largest ``sqrt(Σ w² v²)``: how far a mean moves when its weights or values are rounded
independently by one part in one. ``scores`` bounds the size of the scores, and is at least the
cap, where there is one: kernels make its tanh of numbers near 1, which rounds a capped score as if
it were of the cap's size.

A mistake in the eager code or in the oracle would widen this tolerance, so the two are compared in
float32 first: they may differ by rounding only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..ops.paged_attention import reference
from ..ops.paged_attention.problem import Arguments
from ..ops.scales import LARGEST_CODE
from ..tiles.state import AttentionOutput
from .paged_cases import PagedInputs


class Tolerance(NamedTuple):
    """The largest errors that a result may have."""

    out: float
    lse: float


@dataclass(frozen=True)
class Comparison:
    """A result's errors against the oracle, and the tolerances."""

    error: Tolerance
    """Largest absolute errors; infinite where NaN, or a wrong -inf, was found."""
    rms: Tolerance
    """Root mean square errors."""
    allowed: Tolerance
    out_at: tuple[int, ...]
    """Token, head and column of the worst element of ``out``."""
    lse_at: tuple[int, ...]
    """Token and head of the worst element of ``lse``."""

    @property
    def ratio(self) -> float:
        """The larger of the two errors divided by their tolerances: over 1 is wrong."""
        return max(map(_ratio, self.error, self.allowed))

    def __str__(self) -> str:
        """Both errors, their allowances and where they are worst."""
        return "\n".join(
            f"{name}: max error {error:.3g} (allowed {allowed:.3g}) at {list(at)}, RMS {rms:.3g}"
            for name, error, allowed, at, rms in zip(
                ("out", "lse"),
                self.error,
                self.allowed,
                (self.out_at, self.lse_at),
                self.rms,
                strict=True,
            )
        )


def _ratio(error: float, allowed: float) -> float:
    return error / allowed if allowed else math.inf * error if error else 0.0


def oracle(inputs: PagedInputs) -> AttentionOutput:
    """The reference in float64; ``out`` is float64 ``[num_tokens, num_heads, v_head_size]``.

    Examples:
        >>> from pagetile.testing import PagedCase, make_inputs
        >>> oracle(make_inputs(PagedCase(head_size=8))).out.dtype
        torch.float64
    """
    q = inputs.q.double()
    out = q.new_empty(*q.shape[:2], inputs.v_cache.shape[-1])
    return reference.run(inputs.problem, _arguments(inputs)._replace(q=q, out=out))


def _arguments(inputs: PagedInputs) -> Arguments:
    scale = inputs.options.get("softmax_scale")
    scale = inputs.q.shape[-1] ** -0.5 if scale is None else scale
    options = {**inputs.options, "softmax_scale": scale}
    return Arguments(inputs.q, inputs.k_cache, inputs.v_cache, inputs.batch, **options)


def tolerance(inputs: PagedInputs, expected: AttentionOutput | None = None) -> Tolerance:
    """Return the largest errors of a result for these inputs; see the module's formula.

    Args:
        inputs: A call.
        expected: ``oracle(inputs)``; computed if not given.

    Examples:
        >>> from pagetile.testing import PagedCase, make_inputs
        >>> single, half = (
        ...     tolerance(make_inputs(PagedCase(dtype=dtype))).out
        ...     for dtype in (torch.float32, torch.bfloat16)
        ... )
        >>> single < 1e-4 < half < 0.1
        True
    """
    expected = expected or oracle(inputs)
    if not expected.lse.numel():
        return Tolerance(0.0, 0.0)
    dtype = inputs.q.dtype
    if inputs.k_cache.dtype not in LARGEST_CODE:
        dtype = torch.promote_types(dtype, inputs.k_cache.dtype)
    eager = _eager(inputs, dtype)
    eager32 = eager if dtype == torch.float32 else _eager(inputs, torch.float32)
    u, u32 = (torch.finfo(kind).eps / 2 for kind in (inputs.q.dtype, torch.float32))
    finite = expected.lse[expected.lse.isfinite()]
    scores = eager.scores + (float(finite.abs().max()) if len(finite) else 0.0)
    float32_band = 4 * u32 * (1 + scores)
    _check_agreement(eager32, expected, float32_band)
    float32_band = 4 * u32 * (1 + max(scores, inputs.options.get("logits_soft_cap") or 0.0))
    out = 2 * _errors(eager.out, expected.out).max().item()
    out += 2 * u * (expected.out.abs().max().item() + eager.spread) + float32_band * eager.spread
    return Tolerance(out, 2 * _errors(eager32.lse, expected.lse).max().item() + float32_band)


def _check_agreement(eager32: _Eager, expected: AttentionOutput, band: float) -> None:
    """Raise AssertionError where eager float32 code and the oracle differ by more than rounding.

    ``band`` is what rounding scores does to a weight, relative to it.
    """
    size = expected.out.abs().max().item() + eager32.spread
    for name, found, exact, bound in (
        ("out", eager32.out, expected.out, 4 * band * size),
        ("lse", eager32.lse, expected.lse, 4 * band),
    ):
        gap = _largest(_errors(found, exact))
        assert gap <= bound, (
            f"{name} of eager float32 attention and of the oracle differ by {gap:.3g}, rounding "
            f"explains {bound:.3g}: one of the two computes something else"
        )


def compare(
    result: AttentionOutput,
    inputs: PagedInputs,
    expected: AttentionOutput | None = None,
    allowed: Tolerance | None = None,
) -> Comparison:
    """Measure a result against the oracle.

    Args:
        result: What ``paged_attention`` returned for ``inputs``.
        inputs: The call.
        expected: ``oracle(inputs)``, if it is at hand.
        allowed: ``tolerance(inputs)``, likewise.

    Examples:
        >>> from pagetile.testing import PagedCase, make_inputs
        >>> inputs = make_inputs(PagedCase(head_size=8))
        >>> compare(inputs.attend(impl="reference"), inputs).ratio < 1
        True
    """
    expected = expected or oracle(inputs)
    allowed = allowed or tolerance(inputs, expected)
    out, lse = _errors(result.out, expected.out), _errors(result.lse, expected.lse)
    return Comparison(
        error=Tolerance(_largest(out), _largest(lse)),
        rms=Tolerance(_rms(out), _rms(lse)),
        allowed=allowed,
        out_at=_where_largest(out),
        lse_at=_where_largest(lse),
    )


def assert_matches(
    result: AttentionOutput,
    inputs: PagedInputs,
    expected: AttentionOutput | None = None,
    allowed: Tolerance | None = None,
) -> None:
    """Raise AssertionError unless a result is right: shape, types, and both errors.

    Args:
        result: What ``paged_attention`` returned for ``inputs``.
        inputs: The call.
        expected: ``oracle(inputs)``, if it is at hand.
        allowed: ``tolerance(inputs)``, likewise.

    Examples:
        >>> from pagetile.testing import PagedCase, make_inputs
        >>> inputs = make_inputs(PagedCase(sliding_window=3))
        >>> assert_matches(inputs.attend(impl="reference"), inputs)
        >>> assert_matches(inputs.attend(impl="reference", sliding_window=4), inputs)
        Traceback (most recent call last):
        AssertionError: s1-h4/2-d64-b16-w3-f32 is wrong...
    """
    assert result.out.dtype == inputs.q.dtype, f"out is {result.out.dtype}, q {inputs.q.dtype}"
    assert result.lse.dtype == torch.float32, f"lse is {result.lse.dtype}, expected float32"
    comparison = compare(result, inputs, expected, allowed)
    assert comparison.ratio <= 1, f"{inputs.case} is wrong\n{comparison}\n{inputs.case!r}"


class _Eager(NamedTuple):
    out: Tensor
    lse: Tensor
    spread: float
    scores: float


def _eager(inputs: PagedInputs, dtype: torch.dtype) -> _Eager:
    """Attention as model code writes it, every step rounded to ``dtype``."""
    options, batch = _arguments(inputs), inputs.batch
    starts, tables = batch.cu_seqlens_q.tolist(), batch.block_tables.tolist()
    outs, lses, spreads, sizes = [], [], [0.0], [0.0]
    for seq, seq_len in enumerate(batch.seq_lens.tolist()):
        q = inputs.q[starts[seq] : starts[seq + 1]].to(dtype).movedim(0, 1)  # [heads, query, size]
        caches = (inputs.k_cache, options.k_scale), (inputs.v_cache, options.v_scale)
        k, v = (_contiguous(*cache, tables[seq], seq_len, q) for cache in caches)
        scores = _eager_scores(q, k, options, seq)
        weights = torch.softmax(scores, dim=-1).nan_to_num(0.0)[..., :seq_len]
        outs.append((weights @ v).movedim(0, 1))
        if not scores.shape[-1]:
            scores = scores.new_full((*scores.shape[:2], 1), -torch.inf)
        lses.append(scores.logsumexp(dim=-1).T)
        if seq_len and q.shape[1]:
            squares = weights.float() ** 2 @ v.float() ** 2
            spreads.append(squares.max().item() ** 0.5)
            longest = q.float().norm(dim=-1).max() * k.float().norm(dim=-1).max()
            sizes.append(longest.item() * abs(options.softmax_scale))
    return _Eager(torch.cat(outs), torch.cat(lses), max(spreads), max(sizes))


def _contiguous(
    cache: Tensor, scale: Tensor | None, table: list[int], seq_len: int, q: Tensor
) -> Tensor:
    """A sequence's entries ``[num_heads, seq_len, size]`` in the element type of ``q``."""
    pages = []
    for block in table[: -(-seq_len // cache.shape[1])]:
        page = cache[block]
        if scale is not None:
            page = page.float() * (scale[block] if scale.dim() == 3 else scale)[..., None]
        pages.append(page.to(q.dtype))
    entries = torch.cat(pages)[:seq_len] if pages else q.new_empty(0, *cache.shape[2:])
    return entries.movedim(1, 0).repeat_interleave(q.shape[0] // cache.shape[2], dim=0)


def _eager_scores(q: Tensor, k: Tensor, options: Arguments, seq: int) -> Tensor:
    """Masked scores ``[num_heads, query_len, seq_len]``, with a column more if there are sinks."""
    query_len, seq_len = q.shape[1], k.shape[1]
    scores = q @ k.mT * options.softmax_scale
    if options.logits_soft_cap is not None:
        scores = (scores / options.logits_soft_cap).tanh() * options.logits_soft_cap
    positions = torch.arange(query_len)[:, None] + seq_len - query_len
    keys = torch.arange(seq_len)
    if options.alibi_slopes is not None:
        slopes = options.alibi_slopes.float()[:, None, None]
        scores = scores + (slopes * (keys - positions)).to(q.dtype)
    hidden = torch.zeros(query_len, seq_len, dtype=torch.bool)
    if options.causal:
        hidden |= keys > positions
    if options.sliding_window is not None:
        hidden |= keys < positions - options.sliding_window + 1
    if options.visible_blocks is not None:
        blocks = keys // options.k_cache.shape[1]
        listed = torch.stack([torch.isin(blocks, row) for row in options.visible_blocks[seq]])
        hidden = hidden | ~listed.repeat_interleave(q.shape[0] // len(listed), dim=0)[:, None]
    scores = torch.where(hidden, -torch.inf, scores)
    if options.sinks is not None:
        sinks = options.sinks.to(q.dtype)[:, None, None].expand(-1, query_len, 1)
        scores = torch.cat([scores, sinks], dim=-1)
    return scores


def _errors(result: Tensor, expected: Tensor) -> Tensor:
    """Absolute differences in float64; infinite where only one side is -inf, or either is NaN."""
    assert result.shape == expected.shape, f"shape {list(result.shape)} != {list(expected.shape)}"
    result, expected = result.double(), expected.double()
    errors = torch.where(result == expected, 0.0, (result - expected).abs())
    return errors.nan_to_num(nan=math.inf, posinf=math.inf)


def _largest(errors: Tensor) -> float:
    return errors.max().item() if errors.numel() else 0.0


def _rms(errors: Tensor) -> float:
    return errors.square().mean().sqrt().item() if errors.numel() else 0.0


def _where_largest(errors: Tensor) -> tuple[int, ...]:
    if not errors.numel():
        return ()
    return tuple(int(index) for index in torch.unravel_index(errors.argmax(), errors.shape))
