"""What a forward pass is fed with, as arrays on the host, and its way to the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..models.forward_batch import ForwardBatch
from ..ops.paged_attention import PagedBatch
from ..transfer import pack, unpack

__all__ = ["StepInputs", "make_batch"]


@dataclass(frozen=True, eq=False)
class StepInputs:
    """A step's tokens and where they belong: the arrays of a ``ForwardBatch``."""

    token_ids: npt.NDArray[Any]
    """int64 ``[num_tokens]``"""
    positions: npt.NDArray[Any]
    """int64 ``[num_tokens]``"""
    slot_mapping: npt.NDArray[Any]
    """int64 ``[num_tokens]``"""
    logits_rows: npt.NDArray[Any]
    """int64 ``[n]``"""
    seq_lens: npt.NDArray[Any]
    """int32 ``[num_seqs]``"""
    starts: npt.NDArray[Any]
    """int32 ``[num_seqs + 1]``: ``cu_seqlens_q``"""
    block_tables: npt.NDArray[Any]
    """int32 ``[num_seqs, max_blocks_per_seq]``"""

    @property
    def num_seqs(self) -> int:
        """How many sequences take part."""
        return len(self.seq_lens)

    @property
    def is_decode(self) -> bool:
        """Whether every sequence has one new token, and its logits are wanted."""
        return len(self.token_ids) == self.num_seqs == len(self.logits_rows)

    @property
    def arrays(self) -> Sequence[npt.NDArray[Any]]:
        """All of them, in order."""
        return tuple(vars(self).values())

    def pad(self, num_seqs: int, width: int) -> StepInputs:
        """A decode step with more sequences: empty ones, which see no key and write none.

        Args:
            num_seqs: How many there will be.
            width: Columns of the block tables.
        """
        more = num_seqs - self.num_seqs
        return StepInputs(
            token_ids=np.pad(self.token_ids, (0, more)),
            positions=np.pad(self.positions, (0, more)),
            slot_mapping=np.pad(self.slot_mapping, (0, more), constant_values=-1),
            logits_rows=np.arange(num_seqs),
            seq_lens=np.pad(self.seq_lens, (0, more)),
            starts=np.arange(num_seqs + 1, dtype=np.int32),
            block_tables=np.pad(
                self.block_tables, ((0, more), (0, width - self.block_tables.shape[1]))
            ),
        )

    def send(self, device: torch.device) -> ForwardBatch:
        """The same on the device, in one transfer; on a CPU the arrays themselves."""
        if device.type == "cpu":
            tensors = [torch.from_numpy(array) for array in self.arrays]
        else:
            packed = pack(self.arrays, device).to(device, non_blocking=True)
            tensors = unpack(packed, self.arrays)
        most = int(np.diff(self.starts).max())
        return make_batch(tensors, max_query_len=most, max_seq_len=int(self.seq_lens.max()))


def make_batch(tensors: Sequence[Tensor], *, max_query_len: int, max_seq_len: int) -> ForwardBatch:
    """A forward's batch from the tensors of ``StepInputs.arrays``."""
    token_ids, positions, slot_mapping, logits_rows, seq_lens, starts, block_tables = tensors
    return ForwardBatch(
        token_ids=token_ids,
        positions=positions,
        batch=PagedBatch(
            block_tables, seq_lens, starts, max_query_len=max_query_len, max_seq_len=max_seq_len
        ),
        slot_mapping=slot_mapping,
        logits_rows=logits_rows,
    )
