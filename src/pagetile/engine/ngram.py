"""Prompt-lookup speculation: drafts come from the sequence's own tokens, by n-gram look-up.

The draft is what followed an earlier occurrence of the last few tokens. The next step computes the
draft with the last token and samples after each; drafted tokens are accepted as long as they equal
the sampled ones (``verify``)::

    tokens    … def add ( a , b ) …  … def add ( a          the last 4 tokens came before
    draft                                        , b ) …
    sampled                                      , c        "," is accepted, and "c" comes with it

Drafts become shorter where few of their tokens are accepted, and longer again where all are,
because every drafted token costs time.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .outputs import CacheCounts
    from .step import SchedulerOutput

MAX_N = 4
"""Longest n-gram that is compared; of equally long matches the latest is taken."""
MAX_PLACES = 16
"""Most earlier occurrences that one look-up compares."""


class NgramProposer:
    """Drafts the continuation of one sequence from an earlier occurrence of its suffix.

    Occurrences of the same two tokens are a linked list, the latest first, so a look-up compares a
    few of them whatever the length of the sequence.

    Args:
        token_ids: The sequence's tokens: the live list, which only grows.
        num_tokens: The most tokens of a draft; the first draft has as many.

    Examples:
        >>> NgramProposer([7, 1, 2, 3, 4, 9, 2, 3], num_tokens=3).propose(3)
        [4, 9, 2]
    """

    def __init__(self, token_ids: list[int], num_tokens: int) -> None:
        self._token_ids, self._num_tokens = token_ids, num_tokens
        self._latest: dict[tuple[int, int], int] = {}
        """Maps two tokens to the position after their latest occurrence."""
        self._earlier = [0, 0]
        """Maps a position to that of the previous occurrence of the same two tokens; 0: none."""
        self._length = num_tokens
        """Tokens of the next draft."""
        self._start, self._draft = 0, list[int]()
        """How many tokens there were before the last draft, and that draft."""

    def propose(self, most: int) -> list[int]:
        """Draft at most ``most`` tokens; none if the last two tokens never came before."""
        self._adapt_length()
        self._start = len(self._token_ids)
        # At length 0 one token is still looked up; if it is sampled, drafts start again.
        self._draft = self._look_up(min(most, max(1, self._length)))
        return self._draft[: self._length]

    def _adapt_length(self) -> None:
        """Adapt the draft length to how many tokens of the last draft were sampled.

        All: about twice as many next. Otherwise: half-way to the number accepted, rounded down. A
        draft that was not computed, for lack of blocks, may change nothing.
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
        """Return ``most`` tokens after the latest occurrence of the longest repeated suffix."""
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
        # Near the end of the tokens the draft repeats itself, so a loop continues.
        return (draft * -(-most // len(draft)))[:most]

    def _index_new(self) -> None:
        """Index new positions, except the last: the suffix must not match itself."""
        tokens, latest, earlier = self._token_ids, self._latest, self._earlier
        for position in range(len(earlier), len(tokens)):
            pair = tokens[position - 2], tokens[position - 1]
            earlier.append(latest.get(pair, 0))
            latest[pair] = position

    def _match(self, place: int) -> int:
        """Return how many of the last tokens are also before ``place``: 2 to ``MAX_N``."""
        tokens, most, n = self._token_ids, min(MAX_N, place), 2
        while n < most and tokens[place - 1 - n] == tokens[-1 - n]:
            n += 1
        return n


def verify(step: SchedulerOutput, token_ids: list[int], counts: CacheCounts) -> list[int]:
    """Roll back drafted tokens that were not sampled, when a step is read.

    ::

        token_ids     [… 7]          draft  [1 2 3]         computed [7 1 2 3], sampled [1 2 9 4]
        after verify  [… 7 1 2] 9    num_computed - 1       blocks past the end are given back

    The step's drafts are cut to the accepted tokens.

    Returns:
        The positions in ``step.sampled`` whose tokens are kept.
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
    """Return, for each of ``step.sampled``, the drafted tokens that it assumes."""
    found, num_seen = [], dict.fromkeys(step.drafts, 0)
    for at in step.logits_rows:
        draft = step.drafts.get(at, [])[: num_seen.get(at, 0)]
        num_seen[at] = len(draft) + 1
        found.append(draft)
    return found
