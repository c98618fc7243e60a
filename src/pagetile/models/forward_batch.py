"""The inputs of one forward pass of a model."""

from __future__ import annotations

from dataclasses import dataclass

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
