"""Triton kernels that sample a step's rows: one graph for all that rows may ask for.

::

    score    one program 1 to 8    tile of the logits ─► best logit; best score and its token
    choose   one program a row     tiles ─► token ─► row: last token, length + 1, counts
    cut      one program a row     token ─► it, or another that top_k, top_p and min_p keep ─► row
    report   one program a row     tiles, token ─► log-probabilities

The token with the largest score of all is the one with the largest score of those that are kept, if
it is kept itself, so cuts come after the draw. ``cut`` and ``report`` return at once for rows that
do not ask for them.

``score`` reads the logits once. A score is ``(x - tile's best) / temperature - log(E)``, so that it
keeps its digits at low temperatures; ``choose`` adds what lies between the tiles' bests. The noise
E is that of ``torch_draw.make_noise``, bit for bit but for the logarithms.
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
from .triton_rows import INVERSE, NUM_FLOATS, advance, has_cut
from .triton_score import score_kernel

if TYPE_CHECKING:
    from .sampler import Sampler

TILE = 2048
FEWEST_ROWS = 32
"""With so many rows or more a program scores several tiles."""
MOST_REGISTERS = 80
"""A thread that scores several tiles has so many: three programs fit a multiprocessor."""
WIDTH = 2 + 2 * MAX_TOP
"""int32 words of a row's log-probabilities."""


@triton.jit
def choose_kernel(
    # outputs
    chosen,  # int64 [n]
    largest,  # float32 [n]: the largest logit
    last_tokens,  # int64 [num_rows]: of rows without cuts, as are lengths and counts
    lengths,  # int32 [num_rows]
    # inputs
    bests,  # float32 [n, NUM_TILES]
    scores,  # float32 [n, NUM_TILES]
    tokens,  # int32 [n, NUM_TILES]
    rows,  # int32 or int64 [n]
    ints,  # int32 [num_rows, NUM_INTS]
    floats,  # float64 [num_rows, NUM_FLOATS]
    addresses,  # int64 [num_rows, NUM_TABLES]: a row's counts are written
    # scalars
    vocab_size,
    num_tiles,
    NUM_TILES: tl.constexpr,
):
    """Choose each row's token from the tiles' best scores; rows without cuts advance."""
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
    if has_cut(row, ints, floats, vocab_size) == 0:
        advance(row, found, last_tokens, lengths, addresses)


def count_tiles(n: int, itemsize: int) -> int:
    """Tiles of a program of ``score_kernel``: with few rows it takes all programs to fill a GPU."""
    return 1 if n < FEWEST_ROWS else 16 // itemsize


def draw(
    logits: Tensor,
    rows: Tensor,
    state: Sampler,
    step_masks: Tensor | None = None,
    *,
    leaves_out: bool = False,
) -> Tensor:
    """Sample rows and advance them: int32 words, which ``unpack`` reads.

    Args:
        logits: ``[n, vocab_size]``, last dimension contiguous.
        rows: ``[n]``; a negative one gets no token.
        state: The rows' parameters, last tokens and lengths.
        step_masks: int32 ``[n, ceil(vocab_size / 32)]``: bits of the tokens that are allowed now.
        leaves_out: Whether to leave the logits of negative rows unread, which saves time where
            there are many of them; each of the others waits for its number first.
    """
    n, vocab_size = logits.shape
    num_tiles, num_words = triton.cdiv(vocab_size, TILE), triton.cdiv(vocab_size, 32)
    padded = max(4, triton.next_power_of_2(num_tiles))
    device = logits.device
    bests, scores, raw_bests, sums = torch.empty(4, n, padded, dtype=torch.float32, device=device)
    tokens = torch.empty(n, padded, dtype=torch.int32, device=device)
    packed = torch.empty(count_words(n), dtype=torch.int32, device=device)
    chosen, largest, report = unpack(packed, n)
    row_state = rows, state.lengths, state.ints, state.floats, state.addresses
    scalars = logits.stride(0), vocab_size, num_words
    tiles = count_tiles(n, logits.element_size())
    score_kernel[(n, triton.cdiv(num_tiles, tiles))](
        bests, scores, tokens, raw_bests, sums, logits, step_masks,
        *row_state, *scalars, NUM_TILES=padded, TILE=TILE, TILES=tiles,
        LEAVES_OUT=leaves_out, num_warps=8,
        maxnreg=MOST_REGISTERS if tiles > 1 else None,
    )  # fmt: skip
    choose_kernel[(n,)](
        chosen, largest, state.last_tokens, state.lengths, bests, scores, tokens, rows,
        state.ints, state.floats, state.addresses, vocab_size, num_tiles, NUM_TILES=padded,
        num_warps=1,
    )  # fmt: skip
    cut_kernel[(n,)](
        chosen, state.last_tokens, largest, logits, step_masks, *row_state, *scalars,
        THREADS=512, EACH=16 // logits.element_size(), num_warps=16, maxnreg=64,
    )  # fmt: skip
    report_kernel[(n,)](
        report, chosen, raw_bests, sums, logits, rows, state.ints, logits.stride(0), vocab_size,
        num_tiles, TILE=TILE, NUM_TILES=padded, MAX_TOP=MAX_TOP, num_warps=8,
    )  # fmt: skip
    return packed


def compile_masks(logits: Tensor, state: Sampler) -> None:
    """Compile the kernels for grammars, by a draw without rows."""
    for n in {1, len(logits)}:
        rows = torch.full((n,), -1, dtype=torch.int32, device=logits.device)
        num_words = triton.cdiv(logits.shape[1], 32)
        draw(logits[:n], rows, state, rows.new_zeros(n, num_words))


def _pad(n: int) -> int:
    """So many rows that each part of a result is aligned to 16 bytes, whatever n is."""
    return -(-n // 4) * 4


def count_words(n: int, *, has_logprobs: bool = True) -> int:
    """int32 words of the results of ``n`` rows.

    Each has a token id of two words, its largest logit, and its log-probabilities.
    """
    return _pad(n) * (3 + WIDTH * has_logprobs)


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
