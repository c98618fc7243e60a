"""Triton kernels around a decode step: what its rows compute next, and what they sample.

::

    begin   one program a sequence   row ─► last token, position, slot, length, block table
    score   one program a tile       tile of the logits ─► best logit; best score and its token
    choose  one program a sequence   tiles ─► token ─► row: last token, length + 1

``score`` reads the logits once. A score is ``(x - tile's best) / temperature - log(E)``, so that
it keeps its digits at low temperatures; ``choose`` adds what lies between the tiles' bests. The
noise E is that of ``sampler._noise``, bit for bit but for the logarithms.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..models.forward_batch import ForwardBatch
from ..ops.paged_attention import PagedBatch, SharedPrefixes
from .prefix_groups import MAX_GROUPS

if TYPE_CHECKING:
    from .sampler import Sampler

__all__ = ["DecodeBuffers", "draw"]

TILE = 4096
NUM_INTS: tl.constexpr = tl.constexpr(5)
NUM_FLOATS: tl.constexpr = tl.constexpr(7)


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
def begin_kernel(
    # outputs
    token_ids,  # int64 [size]
    positions,  # int64 [size]
    slots,  # int64 [size]
    seq_lens,  # int32 [size]
    batch_tables,  # int32 [size, width]
    # rows
    tables,  # int32 [num_rows, width]: the last block is written
    last_tokens,  # int64 [num_rows]
    lengths,  # int32 [num_rows]
    # inputs
    inbox,  # int32 [2 * size]: rows, then each one's last block
    # scalars
    size,
    width,
    BLOCK_SIZE: tl.constexpr,
    TILE_W: tl.constexpr,
):
    i = tl.program_id(0)
    row = tl.load(inbox + i).to(tl.int64)
    if row < 0:
        tl.store(token_ids + i, 0)
        tl.store(positions + i, 0)
        tl.store(slots + i, -1)
        tl.store(seq_lens + i, 0)
        return
    length = tl.load(lengths + row)
    block = tl.load(inbox + size + i)
    position = length - 1
    last = position // BLOCK_SIZE
    tl.store(token_ids + i, tl.load(last_tokens + row))
    tl.store(positions + i, position.to(tl.int64))
    tl.store(slots + i, block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE)
    tl.store(seq_lens + i, length)
    tl.store(tables + row * width + last, block)
    for start in range(0, last + 1, TILE_W):
        at = start + tl.arange(0, TILE_W)
        blocks = tl.load(tables + row * width + at, mask=at < last, other=0)
        blocks = tl.where(at == last, block, blocks)
        tl.store(batch_tables + i.to(tl.int64) * width + at, blocks, mask=at <= last)


@triton.jit
def score_kernel(
    # outputs, of each tile
    bests,  # float32 [n, num_tiles]: the largest logit, NaN if any is
    scores,  # float32 [n, num_tiles]: the largest score, less the best logit's part
    tokens,  # int32 [n, num_tiles]: its token
    # inputs
    logits,  # [n, vocab_size]
    rows,  # int32 or int64 [n]
    lengths,  # int32 [num_rows]
    ints,  # int32 [num_rows, NUM_INTS]
    floats,  # float64 [num_rows, NUM_FLOATS]
    # scalars
    stride,
    vocab_size,
    num_tiles,
    TILE: tl.constexpr,
):
    i, tile = tl.program_id(0), tl.program_id(1)
    row = tl.load(rows + i).to(tl.int64)
    if row < 0:
        return
    at = tile * TILE + tl.arange(0, TILE)
    is_token = at < vocab_size
    x = tl.load(logits + i.to(tl.int64) * stride + at, mask=is_token, other=-float("inf"))
    x = x.to(tl.float32)
    best = tl.max(x, 0)
    is_nan = tl.max((x != x).to(tl.int32), 0) > 0
    inverse = tl.load(floats + row * NUM_FLOATS).to(tl.float32)
    score = tl.where(x == best, 0.0, -float("inf"))
    if inverse >= 0:
        position = (tl.load(lengths + row) - tl.load(ints + row * NUM_INTS + 2)).to(tl.uint32)
        first = _mix(tl.load(ints + row * NUM_INTS).to(tl.uint32) + position * 0x9E3779B9, 0)
        key = tl.load(ints + row * NUM_INTS + 1).to(tl.uint32)
        second = _mix((key ^ first) + position * 0x85EBCA6B, 0)
        noise = _exponential(at, first, second)
        centre = tl.where(tl.abs(best) < float("inf"), best, 0.0)  # no infinity less infinity
        score = (x - centre) * inverse - tl.log(noise)
    largest = tl.max(score, 0)
    token = tl.min(tl.where((score == largest) & is_token, at, 2147483647), 0)
    out = i * num_tiles + tile
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
    bests,  # float32 [n, num_tiles]
    scores,  # float32 [n, num_tiles]
    tokens,  # int32 [n, num_tiles]
    rows,  # int32 or int64 [n]
    floats,  # float64 [num_rows, NUM_FLOATS]
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
    best = tl.load(bests + i * num_tiles + at, mask=mask, other=-float("inf"))
    score = tl.load(scores + i * num_tiles + at, mask=mask, other=-float("inf"))
    token = tl.load(tokens + i * num_tiles + at, mask=mask, other=2147483647)
    top = tl.max(best, 0)
    is_nan = tl.max((best != best).to(tl.int32), 0) > 0
    inverse = tl.load(floats + row * NUM_FLOATS).to(tl.float32)
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


def draw(logits: Tensor, rows: Tensor, sampler: Sampler) -> Tensor:
    """Sample rows and advance them: int32 words ``[3 * n]``, token ids int64 then best logits.

    Args:
        logits: ``[n, vocab_size]``, last dimension contiguous.
        rows: ``[n]``; a negative one gets no token.
        sampler: The rows' parameters, last tokens and lengths.
    """
    n, vocab_size = logits.shape
    num_tiles = triton.cdiv(vocab_size, TILE)
    device = logits.device
    bests, scores = torch.empty(2, n, num_tiles, dtype=torch.float32, device=device)
    tokens = torch.empty(n, num_tiles, dtype=torch.int32, device=device)
    packed = torch.empty(3 * n, dtype=torch.int32, device=device)
    score_kernel[(n, num_tiles)](
        bests, scores, tokens, logits, rows, sampler.lengths, sampler.ints, sampler.floats,
        logits.stride(0), vocab_size, num_tiles, TILE=TILE, num_warps=8,
    )  # fmt: skip
    choose_kernel[(n,)](
        packed[: 2 * n].view(torch.int64), packed[2 * n :].view(torch.float32),
        sampler.last_tokens, sampler.lengths, bests, scores, tokens, rows, sampler.floats,
        num_tiles, NUM_TILES=triton.next_power_of_2(num_tiles), num_warps=1,
    )  # fmt: skip
    return packed


class DecodeBuffers:
    """The static memory of decode steps, which graphs read and write.

    Args:
        tables: int32 ``[num_rows, width]``, every row's blocks.
        sampler: The rows' other state.
        block_size: Tokens per block.

    Attributes:
        inbox: int32 ``[2 * num_rows + 2 * MAX_GROUPS + 1]``: a step's rows and last blocks, and
            what its groups share, as the host sends them.
    """

    def __init__(self, tables: Tensor, sampler: Sampler, block_size: int) -> None:
        num_rows, self._width = tables.shape
        self._rows_tables, self._sampler, self._block_size = tables, sampler, block_size
        numbers = torch.arange(num_rows + 1, device=tables.device)
        shape = (2 * num_rows + 2 * MAX_GROUPS + 1,)
        self.inbox = torch.full(shape, -1, dtype=torch.int32, device=tables.device)
        self._token_ids, self._positions, self._slots = (numbers[1:] * 0 for _ in range(3))
        self._starts, self._numbers = numbers.int(), numbers[:num_rows].clone()
        self._seq_lens, self._tables = torch.zeros_like(self.inbox[:num_rows]), tables.clone()
        self._logits: Tensor | None = None

    def clear(self, size: int) -> None:
        """Hold ``size`` rows of no sequence."""
        self.inbox.fill_(-1)
        shared = self._shared_prefixes(size)
        shared.cu_group_seqs.fill_(size)
        shared.cu_group_seqs[:1].zero_()
        shared.prefix_lens.zero_()

    def _shared_prefixes(self, size: int) -> SharedPrefixes:
        lens = 2 * size + MAX_GROUPS + 1
        return SharedPrefixes(self.inbox[2 * size : lens], self.inbox[lens : lens + MAX_GROUPS])

    def __call__(self, size: int, max_seq_len: int, *, shares: bool = False) -> ForwardBatch:
        """Lay out the decode step of the rows in the inbox.

        Args:
            size: How many.
            max_seq_len: The most tokens of one.
            shares: Whether prefixes in the inbox are read once for all sequences of a group.
        """
        outputs = self._token_ids, self._positions, self._slots, self._seq_lens, self._tables
        begin_kernel[(size,)](
            *outputs, self._rows_tables, self._sampler.last_tokens, self._sampler.lengths,
            self.inbox, size, self._width, BLOCK_SIZE=self._block_size, TILE_W=128, num_warps=1,
        )  # fmt: skip
        return ForwardBatch(
            token_ids=self._token_ids[:size],
            positions=self._positions[:size],
            batch=PagedBatch(
                self._tables[:size],
                self._seq_lens[:size],
                self._starts[: size + 1],
                1,
                max_seq_len,
                self._shared_prefixes(size) if shares else None,
            ),
            slot_mapping=self._slots[:size],
            logits_rows=self._numbers[:size],
        )

    def rows(self, size: int) -> Tensor:
        """The rows of the step in the inbox, int32 ``[size]``."""
        return self.inbox[:size]

    def draw(self, logits: Tensor, rows: Tensor) -> Tensor:
        """See ``draw``."""
        return draw(logits, rows, self._sampler)

    def keep(self, logits: Tensor) -> Tensor:
        """A copy of logits where the next graph does not overwrite them."""
        if self._logits is None:
            shape = (len(self._seq_lens), logits.shape[1])
            self._logits = torch.empty(shape, dtype=logits.dtype, device=logits.device)
        kept: Tensor = self._logits[: len(logits)]
        return kept.copy_(logits)
