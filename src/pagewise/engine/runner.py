"""One forward pass: from a step's sequences to their logits."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..kv_cache.storage import KVCache
from ..models.paged_model import ForwardBatch, PagedModel
from ..ops.paged_attention import PagedBatch
from .request import Sequence
from .scheduler import Step

__all__ = ["Runner"]


class Runner:
    """Feeds a model with the tokens, positions, slots and block tables of each step.

    A running sequence keeps a row of one big block table, so that a step only writes the blocks
    that are new.
    """

    def __init__(
        self, model: PagedModel, cache: KVCache, *, max_num_seqs: int, max_model_len: int
    ) -> None:
        self.model, self.cache = model, cache
        width = -(-max_model_len // cache.block_size)
        self._tables = np.zeros((max_num_seqs, width), np.int32)
        self._num_blocks = [0] * max_num_seqs
        self._owners: list[Sequence | None] = [None] * max_num_seqs
        model.bind(cache)

    @torch.inference_mode()
    def run(self, step: Step, ready: list[bool]) -> Tensor:
        """Compute a step.

        Args:
            step: The sequences and how many new tokens of each.
            ready: For each sequence, whether its last token's logits are wanted.

        Returns:
            ``[sum(ready), vocab_size]``.
        """
        self.cache.copy(step.copies)
        return self.model.forward(self._make_batch(step, ready))

    def _make_batch(self, step: Step, ready: list[bool]) -> ForwardBatch:
        rows, token_ids = [], []
        for sequence, chunk in zip(step.sequences, step.num_tokens, strict=True):
            rows.append(self._update_row(sequence))
            start = sequence.num_computed
            token_ids += sequence.token_ids[start : start + chunk]
        computed = np.array([sequence.num_computed for sequence in step.sequences], np.int32)
        query_lens = np.array(step.num_tokens, np.int32)
        seq_lens = computed + query_lens
        ends = np.cumsum(query_lens, dtype=np.int32)
        starts = np.concatenate([np.zeros(1, np.int32), ends])
        size = self.cache.block_size
        max_seq_len = int(seq_lens.max())
        tables = self._tables[rows, : -(-max_seq_len // size)]
        positions = np.arange(ends[-1]) - np.repeat(starts[:-1] - computed, query_lens)
        blocks = tables[np.repeat(np.arange(len(rows)), query_lens), positions // size]
        slots = blocks.astype(np.int64) * size + positions % size
        batch = PagedBatch(
            self._send(tables), self._send(seq_lens), self._send(starts),
            max_query_len=int(query_lens.max()), max_seq_len=max_seq_len,
        )  # fmt: skip
        return ForwardBatch(
            token_ids=self._send(np.array(token_ids, np.int64)),
            positions=self._send(positions.astype(np.int64)),
            batch=batch,
            slot_mapping=self._send(slots),
            logits_rows=self._send(ends[np.array(ready)].astype(np.int64) - 1),
        )

    def _update_row(self, sequence: Sequence) -> int:
        """Write the blocks that a sequence has taken since its last step into its row."""
        row, blocks = sequence.row, sequence.table.blocks
        assert row is not None
        if self._owners[row] is not sequence:
            self._owners[row], self._num_blocks[row] = sequence, 0
        # The last block known may have been replaced by a copy of its own.
        known = max(0, self._num_blocks[row] - 1)
        self._tables[row, known : len(blocks)] = blocks[known:]
        self._num_blocks[row] = len(blocks)
        return row

    def _send(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.model.device)
