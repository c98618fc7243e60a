"""Groups sequences of a decode step that share their first blocks, so that these are read once.

Samples of one prompt share its blocks, and requests with one system prompt share those of the
system prompt. Their block tables begin with the same blocks::

    blocks    a [7 2 5]      groups   {a c} 2 blocks    step   a c b d
              b [4 9]                 {b d} none
              c [7 2 8 1]
              d [6]

Sequences of a group are adjacent in the step. Those that share too little form the last group,
which has no prefix.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from itertools import accumulate
from typing import NamedTuple

from .request import Sequence
from .step import SchedulerOutput

MAX_GROUPS = 8
"""Groups of a step, the one without a prefix included: the capacity of a captured graph."""

_MAX_DIVISIONS = 16
"""How deep groups are divided into groups that share more, to bound the work."""


class PrefixGroups(NamedTuple):
    """Groups of neighbouring sequences of a step, ``MAX_GROUPS`` in all; some may be empty."""

    cu_group_seqs: list[int]
    """Where each group's sequences start, and the end of the last."""
    prefix_lens: list[int]
    """Tokens that a group shares, whole blocks."""


class _Group(NamedTuple):
    members: list[int]
    num_blocks: int

    @property
    def saved(self) -> int:
        """Blocks that need not be read again."""
        return (len(self.members) - 1) * self.num_blocks


class PrefixGrouper:
    """Finds the groups of decode steps, again whenever a step's sequences change."""

    def __init__(self, block_size: int, min_saved_tokens: int) -> None:
        self._block_size = block_size
        self._min_saved = -(-min_saved_tokens // block_size)
        self._sequences: list[Sequence] = []
        self._order: list[int] = []
        self._groups: PrefixGroups | None = None

    def arrange(self, step: SchedulerOutput, *, any_shared: bool) -> None:
        """Reorder a decode step so that sequences with the same first blocks are adjacent."""
        if not any_shared or not step.is_decode or not step.sequences:
            self._sequences = []  # tables may change before the next decode step
            return
        found = self.find(step.sequences, step.ends)
        if found is not None:
            order, step.prefix_groups = found
            step.sequences = [step.sequences[at] for at in order]
            step.ends = [step.ends[at] for at in order]
            step.sampled = step.sequences.copy()

    def find(
        self, sequences: list[Sequence], ends: SequenceOf[int]
    ) -> tuple[list[int], PrefixGroups] | None:
        """Return an order in which groups are adjacent, and the groups in it.

        ``None``: sharing would save too little.
        """
        if sequences != self._sequences:
            self._sequences = sequences.copy()
            tables = [sequence.table.blocks for sequence in sequences]
            # The new token's block is written by its sequence alone.
            limits = [(end - 1) // self._block_size for end in ends]
            self._order, self._groups = self._arrange(tables, limits)
        return None if self._groups is None else (self._order, self._groups)

    def _arrange(
        self, tables: list[list[int]], limits: list[int]
    ) -> tuple[list[int], PrefixGroups | None]:
        found = find_groups(tables, limits)
        found = sorted(found, key=lambda group: -group.saved)[: MAX_GROUPS - 1]
        if sum(group.saved for group in found) < max(1, self._min_saved):
            return [], None
        grouped = {at for group in found for at in group.members}
        others = [at for at in range(len(tables)) if at not in grouped]
        empty = [_Group([], 0)] * (MAX_GROUPS - 1 - len(found))
        found = [*found, *empty, _Group(others, 0)]
        ends = accumulate(len(group.members) for group in found)
        lens = [group.num_blocks * self._block_size for group in found]
        order = [at for group in found for at in group.members]
        return order, PrefixGroups([0, *ends], lens)


def find_groups(tables: SequenceOf[list[int]], limits: SequenceOf[int]) -> list[_Group]:
    """Divide sequences so that sharing saves the most blocks; those that share none are left out.

    ``limits`` says how many blocks of each sequence may be shared.

    Examples:
        >>> find_groups([[7, 2, 5], [4, 9], [7, 2, 8, 1], [6]], [3, 2, 4, 1])
        [_Group(members=[0, 2], num_blocks=2)]
    """
    return _divide(tables, limits, list(range(len(tables))), 0)


def _divide(
    tables: SequenceOf[list[int]],
    limits: SequenceOf[int],
    members: list[int],
    depth: int,
    num_divisions: int = 0,
) -> list[_Group]:
    """Return the groups that save the most, of sequences that have ``depth`` common blocks."""
    if num_divisions > _MAX_DIVISIONS:
        return []
    by_block: dict[int, list[int]] = {}
    for at in members:
        if limits[at] > depth:
            by_block.setdefault(tables[at][depth], []).append(at)
    best: list[_Group] = []
    for branch in by_block.values():
        if len(branch) > 1:
            shared = _count_common(tables, limits, branch)
            inner = _divide(tables, limits, branch, shared, num_divisions + 1)
            whole = _Group(branch, shared)
            is_finer = sum(group.saved for group in inner) > whole.saved
            best += inner if is_finer else [whole]
    return best


def _count_common(
    tables: SequenceOf[list[int]], limits: SequenceOf[int], members: list[int]
) -> int:
    """Return the number of first blocks that all members have in common."""
    # A common prefix of the least and the greatest list is common to all between them.
    least, greatest = (pick(tables[at] for at in members) for pick in (min, max))
    most = min(limits[at] for at in members)
    return next((i for i in range(most) if least[i] != greatest[i]), most)
