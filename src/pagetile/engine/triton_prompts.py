"""The Triton kernel that lays out a step with prompts, and the static memory of such steps.

::

    lay out   one program a sequence   row ─► tokens, positions, slots, block table

A step comes as numbers of 32 bits, in one copy, and its graph reads them where they arrive.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from ..models.forward_batch import ForwardBatch
from ..ops.paged_attention import PagedBatch
from .sampler import Sampler
from .triton_copy import copy_words

Numbers = npt.NDArray[Any]

_NUM_OUTBOXES = 4
"""Used in turn: at most two steps are in flight."""


@triton.jit
def lay_out_kernel(
    # outputs
    token_ids,  # int64 [size]
    positions,  # int64 [size]
    slots,  # int64 [size]; -1: of no sequence
    logits_rows,  # int64 [num_seqs]
    batch_tables,  # int32 [num_seqs + 1, batch_width]
    # rows
    tables,  # int32 [num_rows, width]: new blocks are written
    last_tokens,  # int64 [num_rows]
    lengths,  # int32 [num_rows]: written
    # inputs, int32: ``PromptBuffers`` has them in this order
    seq_lens,
    starts,
    rows,  # -1: of no sequence
    first_columns,
    first_blocks,
    new_logits_rows,
    length_rows,  # -1: none
    new_lengths,
    new_tokens,  # -1: the token that the row drew last
    new_blocks,  # of all sequences
    # scalars
    num_seqs,
    batch_width,
    width,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """See the module docstring. A sequence's new blocks go into its table from a column on."""
    i = tl.program_id(0)
    row = tl.load(rows + i).to(tl.int64)
    exists = row >= 0
    begin = tl.load(starts + i)
    end = tl.load(starts + i + 1)
    length = tl.load(seq_lens + i)
    first = tl.load(first_columns + i)
    table = tables + row * width
    blocks = new_blocks + tl.load(first_blocks + i) - first
    last = tl.load(last_tokens + row, mask=exists, other=0)
    for start in range(begin, end, TILE):
        at = start + tl.arange(0, TILE)
        mask = at < end
        token = tl.load(new_tokens + at, mask=mask, other=0).to(tl.int64)
        position = length - end + at
        column = position // BLOCK_SIZE
        new = tl.load(blocks + column, mask=mask & exists & (column >= first), other=0)
        old = tl.load(table + column, mask=mask & exists & (column < first), other=0)
        slot = (new + old).to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
        tl.store(token_ids + at, tl.where(token < 0, last, token), mask=mask)
        # What fills a step up may be longer than a model's table of positions.
        tl.store(positions + at, tl.where(exists, position, 0).to(tl.int64), mask=mask)
        tl.store(slots + at, tl.where(exists, slot, -1), mask=mask)
    num_columns = tl.where(exists, (length + BLOCK_SIZE - 1) // BLOCK_SIZE, 0)
    for start in range(0, num_columns, TILE):
        column = start + tl.arange(0, TILE)
        mask = column < num_columns
        new = tl.load(blocks + column, mask=mask & (column >= first), other=0)
        old = tl.load(table + column, mask=mask & (column < first), other=0)
        tl.store(batch_tables + i.to(tl.int64) * batch_width + column, new + old, mask=mask)
        tl.store(table + column, new, mask=mask & (column >= first))
    if i < num_seqs:
        tl.store(logits_rows + i, tl.load(new_logits_rows + i).to(tl.int64))
        for k in tl.static_range(2):
            place = i + k * num_seqs
            changed = tl.load(length_rows + place)
            tl.store(lengths + changed, tl.load(new_lengths + place), mask=changed >= 0)


class PromptBuffers:
    """The static inputs of steps that compute prompts, of which each size has a graph.

    A step is filled up by one more sequence, whose tokens are written nowhere::

        21 tokens of 2 sequences, as 32 of up to 4:   starts [0 20 21 21 21 32]
    """

    def __init__(self, tables: Tensor, sampler: Sampler, num_tokens: int, block_size: int) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=tables.device)

        self._rows_tables, self._sampler, self._block_size = tables, sampler, block_size
        self._num_rows, self._width = tables.shape
        self._longest = max(num_tokens, self._width * block_size)
        self._token_ids, self._positions, self._slots = zeros(3, num_tokens)
        # The sequence that fills a step up may be longer than any of a row.
        width = -(-self._longest // block_size)
        self._tables = zeros(self._num_rows + 1, width, dtype=torch.int32)
        self._logits_rows = zeros(self._num_rows)
        self._parts: dict[int, dict[str, slice]] = {}
        self._blank: dict[int, Numbers] = {}
        most = self._find_parts(num_tokens)["new_blocks"].start + tables.numel()
        self._inbox = zeros(most, dtype=torch.int32)
        self._outboxes = deque(
            torch.zeros(most, dtype=torch.int32, device="cpu", pin_memory=tables.is_cuda)
            for _ in range(_NUM_OUTBOXES)
        )

    def least(self, step: dict[str, Numbers]) -> int:
        """The least size that holds a step: a short prompt may have more samples than tokens."""
        return max(len(step["token_ids"]), len(step["rows"]), len(step["logits_rows"]))

    def takes(self, step: dict[str, Numbers]) -> bool:
        """Whether there is room for a step."""
        num_rows = max(len(step["rows"]), len(step["logits_rows"]))
        return num_rows <= self._num_rows and self.least(step) <= len(self._token_ids)

    def clear(self, size: int) -> None:
        """Hold ``size`` tokens of no sequence."""
        blank = self._find_blank(size)
        self._inbox[: len(blank)].copy_(torch.from_numpy(blank))

    def fill(self, step: dict[str, Numbers], size: int, *, draws: bool) -> None:
        """Send a step's numbers to the device, as ``Runner`` gathers them.

        If the graph does not draw, ``Sampler.sample`` does.
        """
        self._outboxes.rotate()
        outbox, parts, blank = self._outboxes[0], self._find_parts(size), self._find_blank(size)
        end = len(blank) + len(step["block_ids"])
        numbers = outbox.numpy()
        numbers[: len(blank)] = blank

        def put(name: str, values: Any) -> None:
            start = parts[name].start
            numbers[start : start + len(values)] = values

        num_tokens = len(step["token_ids"])
        put("seq_lens", step["seq_lens"])
        numbers[parts["seq_lens"].stop - 1] = size - num_tokens
        numbers[parts["starts"]] = num_tokens
        put("starts", step["starts"])
        numbers[parts["starts"].stop - 1] = size
        put("rows", step["rows"])
        put("first_columns", step["first_columns"])
        put("first_blocks", step["first_blocks"])
        put("sampled_rows", step["sampled_rows"])
        if draws:
            put("drawn_rows", step["sampled_rows"])
        put("new_logits_rows", step["logits_rows"])
        lengths = dict(zip(step["rows"].tolist(), step["seq_lens"].tolist(), strict=True))
        # Samples of a prompt that begin in this step have no tokens in it.
        lengths.update(
            zip(step["sampled_rows"].tolist(), step["sampled_lens"].tolist(), strict=True)
        )
        put("length_rows", list(lengths))
        put("new_lengths", list(lengths.values()))
        put("new_tokens", step["token_ids"])
        numbers[parts["new_tokens"].start + step["unread_at"]] = -1
        numbers[len(blank) : end] = step["block_ids"]
        copy_words(self._inbox, outbox, end)

    def __call__(self, size: int) -> ForwardBatch:
        """Lay out the step in the inbox."""
        parts, num_seqs = self._find_parts(size), self._most_seqs(size)
        given = {name: self._inbox[part] for name, part in parts.items()}
        inputs = [given[name] for name in parts if name not in ("drawn_rows", "sampled_rows")]
        lay_out_kernel[(num_seqs + 1,)](
            self._token_ids, self._positions, self._slots, self._logits_rows, self._tables,
            self._rows_tables, self._sampler.last_tokens, self._sampler.lengths, *inputs,
            num_seqs, self._tables.shape[1], self._width, BLOCK_SIZE=self._block_size, TILE=512,
            num_warps=4,
        )  # fmt: skip
        return ForwardBatch(
            token_ids=self._token_ids[:size],
            positions=self._positions[:size],
            batch=PagedBatch(
                self._tables[: num_seqs + 1], given["seq_lens"], given["starts"], size,
                self._longest,
            ),
            slot_mapping=self._slots[:size],
            logits_rows=self._logits_rows[:num_seqs],
        )  # fmt: skip

    def drawn_rows(self, size: int) -> Tensor:
        """The rows that the graph samples, int32; -1: none."""
        return self._inbox[self._find_parts(size)["drawn_rows"]]

    def sampled_rows(self, size: int, num_rows: int) -> Tensor:
        """The rows that are sampled, by the graph or from its logits, int64 ``[num_rows]``."""
        return self._inbox[self._find_parts(size)["sampled_rows"]][:num_rows].long()

    def _most_seqs(self, size: int) -> int:
        """Each has a token or more. Attention looks at every sequence that there may be."""
        return min(size, self._num_rows)

    def _find_parts(self, size: int) -> dict[str, slice]:
        """Where each input lies in the inbox; new blocks, however many, are the last."""
        if size not in self._parts:
            n, start, parts = self._most_seqs(size), 0, {}
            counts = {
                "seq_lens": n + 1, "starts": n + 2, "rows": n + 1, "first_columns": n + 1,
                "first_blocks": n + 1, "new_logits_rows": n, "length_rows": 2 * n,
                "new_lengths": 2 * n, "drawn_rows": n, "sampled_rows": n, "new_tokens": size,
            }  # fmt: skip
            for name, count in counts.items():
                parts[name] = slice(start, start + count)
                start += -(-count // 4) * 4  # kernels read in wide words
            self._parts[size] = parts | {"new_blocks": slice(start, None)}
        return self._parts[size]

    def _find_blank(self, size: int) -> Numbers:
        """The inbox of a step of no sequence."""
        if size not in self._blank:
            parts = self._find_parts(size)
            blank = np.zeros(parts["new_blocks"].start, np.int32)
            for name in ("rows", "length_rows", "drawn_rows"):
                blank[parts[name]] = -1
            for name in ("seq_lens", "starts"):
                blank[parts[name].stop - 1] = size
            self._blank[size] = blank
        return self._blank[size]
