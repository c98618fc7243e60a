"""The proof that a model runs exactly: its logits from pages against its own eager forward.

Two short sequences, packed and chunked as a server would, through blocks in mixed order::

    step            1  first chunk     2  later chunk    3  decode
    sequence A      0 … 6              7 … 12            13
    sequence B      0 … 7              8                 9

Whatever reaches a token from earlier ones other than through the cache (a recurrent state, a
position counted inside the model, a mask) makes a difference in the second step or the third.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import UnsupportedError
from ..kv_cache.storage import KVCache
from ..ops.paged_attention import PagedBatch
from .forward_batch import ForwardBatch

if TYPE_CHECKING:
    from .paged_model import PagedModel

__all__ = ["TOLERANCES", "make_sequences", "prove"]

TOLERANCES = {
    torch.float64: 1e-4,
    torch.float32: 1e-4,
    torch.float16: 0.03,
    torch.bfloat16: 0.1,
}
"""The most that logits may differ, relative to the spread of a token's logits.

Half precision rounds differently in every layer, and a rounding may send a token to another
expert. So there half of a step's tokens may be off; what is wrong by construction hits them all.
"""

_PHASES = ("first chunk", "later chunk", "decode")
_BLOCK_SIZE = 4


def make_sequences(vocab_size: int, max_model_len: int | None) -> tuple[Tensor, Tensor]:
    """Two sequences' token ids: as long as the proof wants, or as the model can take."""
    limit = max_model_len or 14
    steps = torch.arange(1, 25)
    token_ids = steps * 7919 % vocab_size
    return token_ids[: min(14, limit)], token_ids[14 : 14 + min(10, limit)]


@torch.no_grad()
def prove(model: PagedModel, sequences: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    """Raise UnsupportedError unless ``model`` gives the ``expected`` logits.

    Args:
        model: Any cache may be bound to it; none is afterwards.
        sequences: Token ids, each ``[length]`` with at least 3 tokens.
        expected: Each sequence's logits ``[length, vocab_size]``, from an eager forward.
    """
    tables = _lay_out(model, sequences)
    num_done = [0, 0]
    for phase, counts in zip(_PHASES, _cut(*(len(s) for s in sequences)), strict=True):
        step = _make_step(sequences, num_done, counts, tables)
        wanted = torch.cat(
            [logits[at : at + n] for logits, at, n in zip(expected, num_done, counts, strict=True)]
        )
        _compare(model, phase, model.forward(step), wanted)
        num_done = [at + n for at, n in zip(num_done, counts, strict=True)]


def _cut(long: int, short: int) -> list[tuple[int, int]]:
    """New tokens of both sequences in each step."""
    first = long // 2
    return [(first, short - 2), (long - first - 1, 1), (1, 1)]


def _lay_out(model: PagedModel, sequences: tuple[Tensor, Tensor]) -> Tensor:
    """Bind a small cache full of NaN and deal its blocks out in an order that is not sorted."""
    width = -(-max(len(s) for s in sequences) // _BLOCK_SIZE)
    num_blocks = 2 * width + 1
    cache = KVCache(
        model.layers,
        num_blocks=num_blocks,
        block_size=_BLOCK_SIZE,
        dtype=model.dtype,
        device=model.device,
    )
    for blocks in (*cache.k, *cache.v):
        blocks.fill_(torch.nan)
    model.bind(cache)
    order = torch.arange(2 * width, dtype=torch.int32, device=model.device)
    return (num_blocks - 1 - order).view(width, 2).T.contiguous()


def _make_step(
    sequences: tuple[Tensor, Tensor], num_done: list[int], counts: tuple[int, int], tables: Tensor
) -> ForwardBatch:
    device = tables.device
    ends = [at + n for at, n in zip(num_done, counts, strict=True)]
    positions = [torch.arange(at, end, device=device) for at, end in zip(num_done, ends, strict=True)]
    slots = [
        tables[seq, at // _BLOCK_SIZE].long() * _BLOCK_SIZE + at % _BLOCK_SIZE
        for seq, at in enumerate(positions)
    ]
    starts = torch.tensor([0, counts[0], sum(counts)], dtype=torch.int32, device=device)
    lengths = torch.tensor(ends, dtype=torch.int32, device=device)
    return ForwardBatch(
        token_ids=torch.cat([s[at] for s, at in zip(sequences, positions, strict=True)]),
        positions=torch.cat(positions),
        batch=PagedBatch(tables, lengths, starts, max(counts), max(ends)),
        slot_mapping=torch.cat(slots),
        logits_rows=torch.arange(sum(counts), device=device),
    )


def _compare(model: PagedModel, phase: str, logits: Tensor, expected: Tensor) -> None:
    expected = expected.float()
    spread = (expected - expected.mean(-1, keepdim=True)).norm(dim=-1).clamp_min(1e-30)
    errors = (logits.float() - expected).norm(dim=-1) / spread
    error = float(errors.max() if model.dtype.itemsize >= 4 else errors.median())
    tolerance = TOLERANCES[model.dtype]
    if not error <= tolerance:  # NaN, too
        raise UnsupportedError(
            f"{model.name} gives other logits from a paged cache than in its own eager forward "
            f"({phase}: relative error {error:.1e}, at most {tolerance:.0e} expected): something "
            "beside its attention carries from token to token, or its attention computes "
            "something that it does not tell"
        )
