"""One forward pass: from a step's sequences to their logits."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..kv_cache import BlockTable
from ..kv_cache.storage import KVCache
from ..models.paged_model import PagedModel
from .cuda_graphs import DecodeGraphs
from .request import Sequence
from .scheduler import Step
from .step_inputs import StepInputs

__all__ = ["Runner"]


class Runner:
    """Feeds a model with the tokens, positions, slots and block tables of each step.

    A running sequence keeps a row of one big block table, so that a step only writes the blocks
    that are new. On a GPU decode steps are replayed from graphs.

    Attributes:
        graphs: The recorded decode steps; ``None`` on a CPU, or if ``enforce_eager``.
    """

    def __init__(
        self,
        model: PagedModel,
        cache: KVCache,
        *,
        max_num_seqs: int,
        max_model_len: int,
        enforce_eager: bool = False,
    ) -> None:
        self.model, self.cache = model, cache
        width = -(-max_model_len // cache.block_size)
        self._tables = np.zeros((max_num_seqs, width), np.int32)
        self._num_blocks = [0] * max_num_seqs
        self._owners: list[BlockTable | None] = [None] * max_num_seqs
        self.graphs: DecodeGraphs | None = None
        if model.device.type == "cuda" and not enforce_eager:
            self.graphs = DecodeGraphs(
                model.forward,
                model.device,
                max_num_seqs=max_num_seqs,
                max_model_len=max_model_len,
                width=width,
            )
        model.bind(cache)

    @torch.inference_mode()
    def run(self, step: Step, ready: list[bool]) -> Tensor:
        """Compute a step.

        Args:
            step: The sequences and how many new tokens of each.
            ready: For each sequence, whether its last token's logits are wanted.

        Returns:
            ``[sum(ready), vocab_size]``, valid until the next step.
        """
        self.cache.copy(step.copies)
        inputs = self._gather(step, ready)
        if self.graphs is not None and inputs.is_decode:
            logits = self.graphs.run(inputs)
            if logits is not None:
                return logits
        return self.model.forward(inputs.send(self.model.device))

    def _gather(self, step: Step, ready: list[bool]) -> StepInputs:
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
        tables = self._tables[rows, : -(-int(seq_lens.max()) // size)]
        positions = np.arange(ends[-1]) - np.repeat(starts[:-1] - computed, query_lens)
        blocks = tables[np.repeat(np.arange(len(rows)), query_lens), positions // size]
        return StepInputs(
            token_ids=np.array(token_ids, np.int64),
            positions=positions.astype(np.int64),
            slot_mapping=blocks.astype(np.int64) * size + positions % size,
            logits_rows=ends[np.array(ready)].astype(np.int64) - 1,
            seq_lens=seq_lens,
            starts=starts,
            block_tables=tables,
        )

    def _update_row(self, sequence: Sequence) -> int:
        """Write the blocks that a sequence has taken since its last step into its row."""
        row, table = sequence.row, sequence.table
        blocks = table.blocks
        assert row is not None
        if self._owners[row] is not table:
            self._owners[row], self._num_blocks[row] = table, 0
        # The last block known may have been replaced by a copy of its own.
        known = max(0, self._num_blocks[row] - 1)
        self._tables[row, known : len(blocks)] = blocks[known:]
        self._num_blocks[row] = len(blocks)
        return row
