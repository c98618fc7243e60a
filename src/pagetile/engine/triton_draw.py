"""Triton kernels that sample a step's rows: one graph for all that rows may ask for.

::

    cut      one program a row     row ─► edge: the smallest logit that top_k, top_p, min_p keep
    score    one program a tile    tile of the logits ─► best logit; best score and its token
    choose   one program a row     tiles ─► token ─► row: last token, length + 1, counts
    report   one program a row     tiles, token ─► log-probabilities

``cut`` and ``report`` return at once for rows that do not ask for them. ``score`` reads the logits
once. A score is ``(x - tile's best) / temperature - log(E)``, so that it keeps its digits at low
temperatures; ``choose`` adds what lies between the tiles' bests. The noise E is that of
``torch_draw.make_noise``, bit for bit but for the logarithms.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from .sampling_rows import MAX_TOP
from .triton_cut import cut_kernel
from .triton_logprobs import report_kernel
from .triton_rows import (
    INVERSE,
    NUM_FLOATS,
    NUM_INTS,
    NUM_LOGPROBS,
    NUM_TABLES,
    load_logits,
    position_of,
    shape_logits,
)

if TYPE_CHECKING:
    from .sampler import DrawState, Sampler

__all__ = ["NUM_WORDS", "draw", "unpack"]

TILE = 2048
WIDTH = 2 + 2 * MAX_TOP
"""int32 words of a row's log-probabilities."""
NUM_WORDS = 3 + WIDTH
"""int32 words of a row's results: a token id of two, its largest logit, log-probabilities."""


@triton.jit
def _mix(x, key):
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x += key
    x *= 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _exponential(token, first, second):
    """Noise of a token, float32: ``-log(1 - u)``."""
    words = _mix(token.to(tl.uint32) + first, second)
    u = ((words & 0x7FFFFFFF).to(tl.int32).to(tl.float32) + 0.5) * (1.0 / 2147483648.0)
    u = tl.minimum(u, 1.0 - 1.0 / 16777216.0)
    # log(1 - u) loses the digits of a small u, and the smallest noise wins.
    series = u * (1.0 + u * (0.5 + u * (1.0 / 3 + u * (0.25 + u * 0.2))))
    return tl.where(u < 0.0625, series, -tl.log(1.0 - u))


@triton.jit
def score_kernel(
    # outputs, of each tile
    bests,  # float32 [n, NUM_TILES]: the largest logit, NaN if any is
    scores,  # float32 [n, NUM_TILES]: the largest score, less the best logit's part
    tokens,  # int32 [n, NUM_TILES]: its token
    raw_bests,  # float32 [n, NUM_TILES]: the model's largest logit, in rows with logprobs
    sums,  # float32 [n, NUM_TILES]: of the model's exp(logit - raw_best), likewise
    # inputs
    logits,  # [n, vocab_size]
    edges,  # float32 [n]: smaller logits are not drawn
    step_masks,  # int32 [n, num_words], or None
    rows,  # int32 or int64 [n]
    lengths,  # int32 [num_rows]
    ints,  # int32 [num_rows, NUM_INTS]
    floats,  # float64 [num_rows, NUM_FLOATS]
    addresses,  # int64 [num_rows, NUM_TABLES]
    # scalars
    stride,
    vocab_size,
    num_words,
    NUM_TILES: tl.constexpr,
    TILE: tl.constexpr,
):
    i, tile = tl.program_id(0), tl.program_id(1)
    row = tl.load(rows + i).to(tl.int64)
    if row < 0:
        return
    at = tile * TILE + tl.arange(0, TILE)
    is_token = at < vocab_size
    out = i * NUM_TILES + tile
    x = load_logits(at, is_token, i, row, logits, stride)
    if tl.load(ints + row * NUM_INTS + NUM_LOGPROBS) >= 0:
        top = tl.max(x, 0)
        centre = tl.where(top > -float("inf"), top, 0.0)  # no infinity less infinity
        tl.store(raw_bests + out, top)
        tl.store(sums + out, tl.sum(tl.exp(x - centre), 0))
    position = position_of(row, lengths, ints)
    x = shape_logits(
        x, at, is_token, i, row, position, ints, floats, addresses, step_masks, num_words
    )
    best = tl.max(x, 0)
    is_nan = tl.max((x != x).to(tl.int32), 0) > 0
    inverse = tl.load(floats + row * NUM_FLOATS + INVERSE).to(tl.float32)
    score = tl.where(x == best, 0.0, -float("inf"))
    if inverse >= 0:
        shift = position.to(tl.uint32)
        first = _mix(tl.load(ints + row * NUM_INTS).to(tl.uint32) + shift * 0x9E3779B9, 0)
        key = tl.load(ints + row * NUM_INTS + 1).to(tl.uint32)
        second = _mix((key ^ first) + shift * 0x85EBCA6B, 0)
        noise = _exponential(at, first, second)
        centre = tl.where(tl.abs(best) < float("inf"), best, 0.0)
        score = (x - centre) * inverse - tl.log(noise)
        score = tl.where(x >= tl.load(edges + i), score, -float("inf"))
    largest = tl.max(score, 0)
    token = tl.min(tl.where((score == largest) & is_token, at, 2147483647), 0)
    tl.store(bests + out, tl.where(is_nan, float("nan"), best))
    tl.store(scores + out, largest)
    tl.store(tokens + out, token)


@triton.jit
def choose_kernel(
    # outputs
    chosen,  # int64 [n]
    largest,  # float32 [n]: the largest logit
    last_tokens,  # int64 [num_rows]
    lengths,  # int32 [num_rows]
    # inputs
    bests,  # float32 [n, NUM_TILES]
    scores,  # float32 [n, NUM_TILES]
    tokens,  # int32 [n, NUM_TILES]
    rows,  # int32 or int64 [n]
    floats,  # float64 [num_rows, NUM_FLOATS]
    addresses,  # int64 [num_rows, NUM_TABLES]: a row's counts are written
    # scalars
    num_tiles,
    NUM_TILES: tl.constexpr,
):
    i = tl.program_id(0)
    row = tl.load(rows + i).to(tl.int64)
    if row < 0:
        return
    at = tl.arange(0, NUM_TILES)
    mask = at < num_tiles
    best = tl.load(bests + i * NUM_TILES + at, mask=mask, other=-float("inf"))
    score = tl.load(scores + i * NUM_TILES + at, mask=mask, other=-float("inf"))
    token = tl.load(tokens + i * NUM_TILES + at, mask=mask, other=2147483647)
    top = tl.max(best, 0)
    is_nan = tl.max((best != best).to(tl.int32), 0) > 0
    inverse = tl.load(floats + row * NUM_FLOATS + INVERSE).to(tl.float32)
    # Greedy rows: 0 in the tiles that hold the best logit.
    total = tl.where(best == top, 0.0, -float("inf"))
    if inverse >= 0:
        centre = tl.where(tl.abs(top) < float("inf"), top, 0.0)
        total = tl.where(best > -float("inf"), (best - centre) * inverse + score, -float("inf"))
    found = tl.min(tl.where(total == tl.max(total, 0), token, 2147483647), 0)
    is_good = (tl.abs(top) < float("inf")) & (is_nan == 0)
    found = tl.where(is_good, found, 0).to(tl.int64)
    tl.store(chosen + i, found)
    tl.store(largest + i, tl.where(is_nan, float("nan"), top))
    tl.store(last_tokens + row, found)
    tl.store(lengths + row, tl.load(lengths + row) + 1)
    counts = tl.load(addresses + row * NUM_TABLES)
    if counts != 0:
        count = counts.to(tl.pointer_type(tl.int32)) + found
        tl.store(count, tl.load(count) + 2)


def draw(
    logits: Tensor, rows: Tensor, state: Sampler | DrawState, step_masks: Tensor | None = None
) -> Tensor:
    """Sample rows and advance them: int32 words, which ``unpack`` reads.

    Args:
        logits: ``[n, vocab_size]``, last dimension contiguous.
        rows: ``[n]``; a negative one gets no token.
        state: The rows' parameters, last tokens and lengths.
        step_masks: int32 ``[n, ceil(vocab_size / 32)]``: bits of the tokens that are allowed now.
    """
    n, vocab_size = logits.shape
    num_tiles, num_words = triton.cdiv(vocab_size, TILE), triton.cdiv(vocab_size, 32)
    padded = max(4, triton.next_power_of_2(num_tiles))
    device = logits.device
    bests, scores, raw_bests, sums = torch.empty(4, n, padded, dtype=torch.float32, device=device)
    tokens = torch.empty(n, padded, dtype=torch.int32, device=device)
    edges = torch.empty(n, dtype=torch.float32, device=device)
    packed = torch.empty(_pad(n) * NUM_WORDS, dtype=torch.int32, device=device)
    chosen, largest, report = unpack(packed, n)
    row_state = rows, state.lengths, state.ints, state.floats, state.addresses
    scalars = logits.stride(0), vocab_size, num_words
    cut_kernel[(n,)](
        edges, logits, step_masks, *row_state, *scalars,
        THREADS=512, EACH=16 // logits.element_size(), num_warps=16, maxnreg=64,
    )  # fmt: skip
    score_kernel[(n, num_tiles)](
        bests, scores, tokens, raw_bests, sums, logits, edges, step_masks,
        *row_state, *scalars, NUM_TILES=padded, TILE=TILE, num_warps=8,
    )  # fmt: skip
    choose_kernel[(n,)](
        chosen, largest, state.last_tokens, state.lengths, bests, scores, tokens, rows,
        state.floats, state.addresses, num_tiles, NUM_TILES=padded, num_warps=1,
    )  # fmt: skip
    report_kernel[(n,)](
        report, chosen, raw_bests, sums, logits, rows, state.ints, logits.stride(0), vocab_size,
        num_tiles, TILE=TILE, NUM_TILES=padded, MAX_TOP=MAX_TOP, num_warps=8,
    )  # fmt: skip
    return packed


def _pad(n: int) -> int:
    """So many rows that each part of a result is aligned to 16 bytes, whatever n is."""
    return -(-n // 4) * 4


def unpack(packed: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Views of what ``draw`` returned.

    Returns:
        Token ids int64 ``[n]``, the largest logits float32 ``[n]``, and int32 ``[n, WIDTH]`` for
        ``read_logprobs``, undefined for rows that ask for none; empty if ``packed`` ends before.
    """
    first, second = 2 * _pad(n), 3 * _pad(n)
    return (
        packed[:first].view(torch.int64)[:n],
        packed[first:second].view(torch.float32)[:n],
        packed[second:].view(-1, WIDTH)[:n],
    )
