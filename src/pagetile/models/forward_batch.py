"""The inputs of one forward pass of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..ops.paged_attention import PagedBatch


@dataclass(frozen=True, eq=False)
class ForwardBatch:
    """New tokens of several sequences, their positions and their slots in the cache."""

    token_ids: Tensor
    """int64 ``[num_tokens]``: all sequences' new tokens, one sequence after another."""
    positions: Tensor
    """int64 ``[num_tokens]``: each token's position in its own sequence."""
    batch: PagedBatch
    """Lengths and block tables of the sequences, in the order of ``token_ids``."""
    slot_mapping: Tensor
    """int64 ``[num_tokens]``: ``block * block_size + offset``; -1 writes nothing."""
    logits_rows: Tensor
    """int64 ``[n]``: the rows of ``token_ids`` whose logits are computed."""

    @staticmethod
    def of(
        token_ids: Sequence[Sequence[int]],
        blocks: Sequence[Sequence[int]],
        ends: Sequence[int],
        *,
        block_size: int,
        device: torch.device,
    ) -> ForwardBatch:
        """New tokens of sequences that have ``ends`` tokens in all, with the logits of each."""
        counts = list(map(len, token_ids))
        spans = [range(end - count, end) for end, count in zip(ends, counts, strict=True)]
        slots = [
            own[at // block_size] * block_size + at % block_size
            for own, span in zip(blocks, spans, strict=True)
            for at in span
        ]
        ids, positions = ([x for part in parts for x in part] for parts in (token_ids, spans))
        numbers = torch.tensor([ids, positions, slots, range(len(ids))], device=device)
        batch = PagedBatch.of(blocks, ends, counts, device=device)
        return ForwardBatch(numbers[0], numbers[1], batch, numbers[2], numbers[3])
