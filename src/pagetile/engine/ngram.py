"""Prompt-lookup speculation: drafts come from the sequence's own tokens, by n-gram look-up.

What followed the last few tokens when they came before is drafted to follow them again. The next
step computes the draft with the last token and samples after each; drafted tokens are accepted as
long as they are what is sampled (``Scheduler.verify``)::

    tokens    … def add ( a , b ) …  … def add ( a          the last 4 tokens came before
    draft                                        , b ) …
    sampled                                      , c        "," is accepted, and "c" comes with it

Drafts become shorter where few of their tokens are accepted, and longer again where all are: every
drafted token costs the step time, and text that does not repeat would pay for seven of them.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .outputs import CacheCounts
    from .scheduler import SchedulerOutput

MAX_N = 4
"""Longest n-gram that is compared; of places with as long a match the latest is taken."""
MAX_PLACES = 16
"""Most places that one look-up compares."""


class NgramProposer:
    """Drafts the continuation of one sequence from the latest place of its longest suffix n-gram.

    Places of the same two tokens are chained, the latest first, so a look-up compares a few places
    whatever the length of the sequence.

    Args:
        token_ids: The sequence's tokens: the live list, which only grows.
        num_tokens: The most tokens of a draft, and those of the first.

    Example:
        >>> NgramProposer([7, 1, 2, 3, 4, 9, 2, 3], num_tokens=3).propose(3)
        [4, 9, 2]
    """

    def __init__(self, token_ids: list[int], num_tokens: int) -> None:
        self._token_ids, self._num_tokens = token_ids, num_tokens
        self._latest: dict[tuple[int, int], int] = {}
        """Two tokens to the position after their latest place."""
        self._earlier = [0, 0]
        """For a position, that after the place before of the same two tokens; 0 is none."""
        self._length = num_tokens
        """Tokens of the next draft."""
        self._start, self._draft = 0, list[int]()
        """The last draft, and how many tokens there were before it."""

    def propose(self, most: int) -> list[int]:
        """Draft at most ``most`` tokens; none if the last two tokens never came before."""
        self._adapt_length()
        self._start = len(self._token_ids)
        # At length 0 one token is looked up all the same: if it comes, there are drafts again.
        self._draft = self._look_up(min(most, max(1, self._length)))
        return self._draft[: self._length]

    def _adapt_length(self) -> None:
        """Let the length follow what became of the last draft, as the tokens since then tell.

        All accepted: about twice as many next. Some rejected: half-way to the number accepted,
        rounded down. A draft that was not computed, since the pool had no blocks for it, may tell
        nothing.
        """
        draft, sampled = self._draft, self._token_ids[self._start :][: len(self._draft)]
        num_accepted = 0
        while num_accepted < len(sampled) and sampled[num_accepted] == draft[num_accepted]:
            num_accepted += 1
        if num_accepted < len(sampled):
            self._length = (self._length + num_accepted) // 2
        elif draft and num_accepted == len(draft):
            self._length = min(self._num_tokens, self._length + num_accepted + 1)

    def _look_up(self, most: int) -> list[int]:
        """The ``most`` tokens after the latest place of the longest suffix that came before."""
        tokens = self._token_ids
        if most < 1 or len(tokens) < 3:
            return []
        self._index_new()
        place = self._latest.get((tokens[-2], tokens[-1]), 0)
        best = longest = 0
        for _ in range(MAX_PLACES):
            if not place or longest == MAX_N:
                break
            length = self._match(place)
            if length > longest:
                best, longest = place, length
            place = self._earlier[place]
        if not best:
            return []
        draft = tokens[best : best + most]
        # Near the end it goes on with what it drafted: a loop stays a loop.
        return (draft * -(-most // len(draft)))[:most]

    def _index_new(self) -> None:
        """Chain the places of all tokens but the last: no match is the suffix itself."""
        tokens, latest, earlier = self._token_ids, self._latest, self._earlier
        for position in range(len(earlier), len(tokens)):
            pair = tokens[position - 2], tokens[position - 1]
            earlier.append(latest.get(pair, 0))
            latest[pair] = position

    def _match(self, place: int) -> int:
        """How many of the last tokens stand before ``place`` too: 2 to ``MAX_N``."""
        tokens, most, n = self._token_ids, min(MAX_N, place), 2
        while n < most and tokens[place - 1 - n] == tokens[-1 - n]:
            n += 1
        return n


def verify(step: SchedulerOutput, token_ids: list[int], counts: CacheCounts) -> list[int]:
    """Take drafted tokens back that were not sampled, when a step is read.

    ::

        token_ids     [… 7]          draft  [1 2 3]         computed [7 1 2 3], sampled [1 2 9 4]
        after verify  [… 7 1 2] 9    num_computed - 1       blocks past the end are given back

    Args:
        step: The step. Of its drafts what was accepted is left.
        token_ids: The tokens of ``step.sampled``.
        counts: Where the tokens are counted.

    Returns:
        The positions in ``step.sampled`` whose tokens count.
    """
    kept = [
        at
        for at, assumed in enumerate(find_assumed(step))
        if token_ids[at - len(assumed) : at] == assumed
    ]
    num_kept = Counter(step.logits_rows[at] for at in kept)
    for at, draft in step.drafts.items():
        sequence, num_rejected = step.sequences[at], len(draft) + 1 - num_kept[at]
        counts.drafts += 1
        counts.draft_tokens += len(draft)
        counts.accepted_tokens += num_kept[at] - 1
        del draft[num_kept[at] - 1 :]
        step.ends[at] -= num_rejected
        sequence.num_tokens -= num_rejected
        sequence.num_computed -= num_rejected
        sequence.table.truncate(sequence.num_computed)
    return kept


def find_assumed(step: SchedulerOutput) -> list[list[int]]:
    """For each of ``step.sampled``, the drafted tokens before the one that it gets."""
    found, num_seen = [], dict.fromkeys(step.drafts, 0)
    for at in step.logits_rows:
        draft = step.drafts.get(at, [])[: num_seen.get(at, 0)]
        num_seen[at] = len(draft) + 1
        found.append(draft)
    return found
