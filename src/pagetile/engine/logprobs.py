"""Log-probabilities: computed for many rows at once, and reported as vLLM's dictionaries.

The best tokens are found without sorting the vocabulary. A row is cut into chunks; the ``k`` best
tokens lie in the ``k`` chunks whose maxima are best, so only those are searched::

    chunk maxima   7  3  9  8  1      k = 2: search the third and the fourth
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor

from ..transfer import send_integers
from .sampling_rows import MAX_TOP

CHUNK = 128  # tokens
ID_BITS = 31


class TokenLogprobs(NamedTuple):
    """Log-probability, rank and alternatives of one token, as numbers."""

    token_id: int
    logprob: float
    rank: int
    """How many tokens are at least as likely, itself included."""
    top_ids: list[int]
    """The likeliest alternatives, best first; of equals the lowest id first."""
    top_logprobs: list[float]

    def top(self, num_top: int | None = None) -> list[tuple[int, float]]:
        """Return at most ``num_top`` alternatives with their log-probabilities, best first."""
        return list(zip(self.top_ids[:num_top], self.top_logprobs, strict=False))


class TokenLogprobsList(Sequence[TokenLogprobs]):
    """A list of ``TokenLogprobs`` that stores plain numbers, and makes each object on access.

    A thousand tokens of each of hundreds of sequences would be as many objects for Python's garbage
    collector to visit repeatedly while the device waits.

    Examples:
        >>> tokens = TokenLogprobsList()
        >>> tokens.append(TokenLogprobs(7, -0.5, 1, [7], [-0.5]))
        >>> tokens[-1]
        TokenLogprobs(token_id=7, logprob=-0.5, rank=1, top_ids=[7], top_logprobs=[-0.5])
    """

    def __init__(self) -> None:
        self._ids = array("q")  # of each token: its id, its rank, and those of the alternatives
        self._logprobs = array("d")  # of each token: its own, and the alternatives'
        self._ends = array("q")  # in the log-probabilities
        self.total = 0.0
        """Sum of the tokens' own log-probabilities."""

    def append(self, token: TokenLogprobs) -> None:
        """Append a token."""
        self._ids.extend((token.token_id, token.rank, *token.top_ids))
        self._logprobs.extend((token.logprob, *token.top_logprobs))
        self._ends.append(len(self._logprobs))
        self.total += token.logprob

    def copy(self) -> TokenLogprobsList:
        """Return a copy."""
        other = TokenLogprobsList()
        other._ids, other._logprobs, other._ends = self._ids[:], self._logprobs[:], self._ends[:]
        other.total = self.total
        return other

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (TokenLogprobsList, list)):
            return NotImplemented
        return list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, at: int) -> TokenLogprobs: ...
    @overload
    def __getitem__(self, at: slice) -> list[TokenLogprobs]: ...
    def __getitem__(self, at: int | slice) -> TokenLogprobs | list[TokenLogprobs]:
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        i = range(len(self))[at]
        start, end = self._ends[i - 1] if i else 0, self._ends[i]
        # Each token before has one id more than it has log-probabilities.
        token_id, rank, *top_ids = self._ids[start + i : end + i + 1]
        logprob, *top_logprobs = self._logprobs[start:end]
        return TokenLogprobs(token_id, logprob, rank, top_ids, top_logprobs)


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log-probability of a token, with vLLM's names."""

    logprob: float
    rank: int | None = None
    """1 for the likeliest. For a token beyond the alternatives, the number of tokens that are at
    least as likely."""
    decoded_token: str | None = None
    """Text that the token adds; ``None`` without a tokenizer."""


class LogprobDicts(Sequence[Any]):
    """A list of dictionaries ``{token_id: Logprob}``, each made on access.

    Each has the token itself first, then the likeliest alternatives. The first token of a prompt,
    which nothing predicts, is ``None``. Pickled, it is a plain list.

    Args:
        tokens: The numbers; not copied.
        decode: Returns the text of a token id; ``None`` without a tokenizer.

    Attributes:
        tokens: The numbers.
    """

    def __init__(
        self, tokens: Sequence[TokenLogprobs | None], decode: Callable[[int], str] | None = None
    ) -> None:
        self.tokens, self._decode = tokens, decode

    def __len__(self) -> int:
        return len(self.tokens)

    @overload
    def __getitem__(self, at: int) -> dict[int, Logprob] | None: ...
    @overload
    def __getitem__(self, at: slice) -> LogprobDicts: ...
    def __getitem__(self, at: int | slice) -> LogprobDicts | dict[int, Logprob] | None:
        if isinstance(at, slice):
            return LogprobDicts(self.tokens[at], self._decode)
        token = self.tokens[at]
        if token is None:
            return None
        found = {token.token_id: self._logprob(token.token_id, token.logprob, token.rank)}
        for rank, (token_id, logprob) in enumerate(token.top(), 1):
            found[token_id] = self._logprob(token_id, logprob, rank)
        return found

    def _logprob(self, token_id: int, logprob: float, rank: int) -> Logprob:
        return Logprob(logprob, rank, None if self._decode is None else self._decode(token_id))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (LogprobDicts, list, tuple)):
            return NotImplemented
        return list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)


@torch.inference_mode()
def compute_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> Tensor:
    """Compute log-probabilities of tokens and of alternatives, packed for one copy to the host.

    The sum over the vocabulary adds float32 exponentials, chunk by chunk, and the chunks' sums in
    float64: a result has an error of a few units in the last place of float32.

    Args:
        logits: ``[n, vocab_size]``, float16, bfloat16 or float32. Not written to.
        token_ids: int64 ``[n]``, one for each row.
        num_top: Alternatives to report, 0 to ``vocab_size``.

    Returns:
        int32 ``[n, 2 + 2 * num_top]``: the token's rank, the ids of the best, and float32 bits of
        the token's log-probability and of the best ones'. ``read_logprobs`` unpacks it.
    """
    n, vocab_size = logits.shape
    chosen = token_ids[:, None]
    rank = (logits >= logits.gather(1, chosen)).sum(dim=1, keepdim=True)
    num_chunks = -(-vocab_size // CHUNK)
    x = logits.new_empty(n, num_chunks * CHUNK, dtype=torch.float32)
    x[:, :vocab_size] = logits
    x[:, vocab_size:] = -torch.inf
    chunks = x.view(n, num_chunks, CHUNK)
    maxima = chunks.amax(dim=2)
    best = maxima.amax(dim=1, keepdim=True)
    top_ids = _find_best(chunks, maxima, num_top)
    picked = x.gather(1, torch.cat([chosen, top_ids], dim=1))
    x.sub_(best).exp_()
    total = chunks.sum(dim=2).sum(dim=1, keepdim=True, dtype=torch.float64)
    logprobs = (picked - best.double() - total.log()).float()
    return torch.cat([rank.int(), top_ids.int(), logprobs.view(torch.int32)], dim=1)


def _find_best(chunks: Tensor, maxima: Tensor, num_top: int) -> Tensor:
    """Return ids of the largest of ``chunks`` ``[n, num_chunks, CHUNK]``: ``[n, num_top]``."""
    _, num_chunks, size = chunks.shape
    numbers = torch.arange(max(num_chunks, size), device=chunks.device)
    where = _smallest_keys(maxima, numbers[:num_chunks], min(num_top, num_chunks))
    candidates = chunks.gather(1, where[:, :, None].expand(-1, -1, size))
    ids = where[:, :, None] * size + numbers[:size]
    return _smallest_keys(candidates.flatten(1), ids.flatten(1), num_top)


def _smallest_keys(values: Tensor, ids: Tensor, count: int) -> Tensor:
    """Return the ids of the largest values, best first; of equals the lowest id first."""
    keys = (descending_order(values).long() << ID_BITS) + ids
    best: Tensor = keys.topk(count, largest=False).values & (2**ID_BITS - 1)
    return best


def descending_order(values: Tensor) -> Tensor:
    """Map float32 values to int32 of the reverse order, equal for equal values."""
    bits = (values + 0.0).view(torch.int32)  # -0.0 + 0.0 is 0.0
    return (bits >> 31).bitwise_and_(0x7FFFFFFF).bitwise_xor_(bits).bitwise_not_()


def add_logprobs(
    known: Tensor | None, logits: Tensor, token_ids: Tensor, at: Sequence[int], num_top: int
) -> Tensor:
    """Add log-probabilities of the rows ``at`` to those of all rows that kernels computed.

    Args:
        known: The kernels' result, of up to ``MAX_TOP`` alternatives; ``None``: nothing.
        logits: As for ``compute_logprobs``.
        token_ids: As for ``compute_logprobs``.
        at: The rows.
        num_top: The most alternatives of one of them.
    """
    num_top = min(num_top, logits.shape[1])
    if len(at) == len(logits):
        return compute_logprobs(logits, token_ids, num_top)
    where = send_integers(at, logits.device)
    found = compute_logprobs(logits[where], token_ids[where], num_top)
    wide = found.new_zeros(len(logits), found.shape[1])
    if known is not None:
        most, end = min(MAX_TOP, num_top) + 1, MAX_TOP + 1
        wide[:, :most] = known[:, :most]
        wide[:, num_top + 1 : num_top + 1 + most] = known[:, end : end + most]
    return wide.index_copy_(0, where, found)


def read_logprobs(
    packed: Tensor, token_ids: Sequence[int], num_top: Sequence[int | None]
) -> list[TokenLogprobs | None]:
    """Unpack the result of ``compute_logprobs`` on the host, for each row.

    Args:
        packed: int32 ``[n, 2 + 2 * k]``.
        token_ids: The tokens that it was computed for.
        num_top: Alternatives to keep of each row; ``None`` for rows that are not reported.
    """
    packed, k = packed.cpu(), packed.shape[1] // 2 - 1
    found: list[TokenLogprobs | None] = [None] * len(token_ids)
    # Rows with equal numbers of alternatives are read together, so one with thousands is alone.
    for count in {n for n in num_top if n is not None}:
        at = [i for i, n in enumerate(num_top) if n == count]
        rows = packed if len(at) == len(token_ids) else packed[at]
        end = 1 + min(k, count)
        numbers = rows[:, :end].tolist()
        logprobs = rows[:, k + 1 : k + 1 + end].view(torch.float32).tolist()
        for i, ids, own in zip(at, numbers, logprobs, strict=True):
            found[i] = TokenLogprobs(token_ids[i], own[0], ids[0], ids[1:], own[1:])
    return found
