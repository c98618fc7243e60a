"""From logits to tokens: penalties, cuts, one draw, and log-probabilities, on the device.

The draw is Gumbel-max: the token with the largest ``logit / temperature - log(E)``, where E is
exponential noise. No softmax over the vocabulary is needed, and tokens come out by their
probabilities. The noise is a hash of (seed, index of the sample, position, token), so a row draws
the same token alone or among others, after preemption, and on another device.

Cuts run on integers. After the temperature a token's likelihood is a whole number of units, 2**40
of them for the likeliest, so sums are exact in any order and a row keeps the same tokens in any
batch. The edge of top-k and top-p is found without sorting, digit by digit: a histogram over the
leading 11 bits of the tokens' order shows in which bucket the edge lies, a second one looks inside
that bucket, a third settles it::

    need 70 units, best tokens first
    bucket    0    1    2    3   ...
    units    40   20   25   10          40 + 20 < 70 <= 40 + 20 + 25: the edge is in bucket 2

Parameters of a running sequence lie on the device in its row; rows are numbers of a
``Sampler``'s tensors.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..errors import GenerationError, NoTokenLeftError, ShapeError
from ..shapes import bind, check_dtype
from ..transfer import send
from .logprobs import TokenLogprobs, compute_logprobs, descending_order, read_logprobs
from .sampling_params import SamplingParams

__all__ = [
    "Feature",
    "SampledToken",
    "SampledTokens",
    "Sampler",
    "SamplingInput",
    "find_features",
    "sample",
]

ONE = 2**40  # units of the likeliest token: 2**23 tokens still sum below 2**63
DIGIT_BITS = 11  # three digits cover the 32 bits of a float's order
COLDEST = 1e-5
"""Below this temperature the likeliest token is taken: logits do not resolve less."""
KEYS, PROMPT_LEN, TOP_K, MIN_TOKENS = slice(0, 2), 2, 3, 4  # columns of Sampler.ints
INVERSE, TEMPERATURE, TAIL, MIN_P, REPETITION, PRESENCE, FREQUENCY = range(7)  # of floats


class Feature(enum.IntFlag):
    """What a row asks of the sampler beyond its likeliest token."""

    RANDOM = 1
    CUT = 2
    """top_k, top_p or min_p"""
    PENALTY = 4
    BIAS = 8
    BAN = 16
    """Tokens that may not be chosen: always, as long as min_tokens lasts, or after others."""
    MASK = 32
    """A grammar's bit mask, another for every token."""
    LOGPROBS = 64


PLAIN = Feature.RANDOM
"""What the draw does by itself."""


@dataclasses.dataclass(frozen=True, slots=True)
class SamplingInput:
    """One row: a sequence about to get its next token.

    Token ids outside the vocabulary (a prompt's image placeholders, say) are ignored.
    """

    params: SamplingParams
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    seed: int  # params.seed, or the one that the engine drew
    index: int  # which of the request's n samples
    end_token_ids: Sequence[int] = ()  # forbidden for params.min_tokens tokens
    bad_words: Sequence[Sequence[int]] = ()  # params.bad_words as tokens


class SampledToken(NamedTuple):
    """The next token of one row.

    Log-probabilities are those of the model: of the logits as they came, before penalties,
    temperature and cuts.
    """

    token_id: int
    logprobs: TokenLogprobs | None = None  # if params.logprobs is not None
    error: str | None = None  # why the row has no token; token_id is 0 then
    error_type: type[GenerationError] = GenerationError  # of that error, raised or not


class SampledTokens(NamedTuple):
    """The next tokens of a step's rows."""

    token_ids: list[int]
    others: dict[int, SampledToken]
    """Of the rows that have more than an id: log-probabilities, or an error."""

    def listed(self) -> list[SampledToken]:
        """One ``SampledToken`` a row."""
        return [self.others.get(at) or SampledToken(i) for at, i in enumerate(self.token_ids)]


class _Draws(NamedTuple):
    """A copy of rows with an entry for each draw: ``Sampler``'s attributes of the same names."""

    last_tokens: Tensor
    lengths: Tensor
    ints: Tensor
    floats: Tensor


def find_features(params: SamplingParams) -> Feature:
    """What these parameters ask for; a grammar's ``MASK`` is the engine's to add."""
    features = Feature(0)
    if not params.is_greedy and params.temperature >= COLDEST:
        features |= Feature.RANDOM
        if params.top_k or params.top_p < 1.0 or params.min_p:
            features |= Feature.CUT
    if (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1, 0, 0):
        features |= Feature.PENALTY
    if params.logit_bias:
        features |= Feature.BIAS
    if params.min_tokens or params.allowed_token_ids is not None or params.bad_words:
        features |= Feature.BAN
    if params.logprobs is not None:
        features |= Feature.LOGPROBS
    return features


class Sampler:
    """Samples rows, each by the parameters that lie on the device.

    The steps, in this order, each on what the one before left:

    1. ``logit_bias`` is added. ``repetition_penalty`` r: the logit x of a token in prompt or
       output becomes x / r if positive and x * r if not. ``presence_penalty`` and
       ``frequency_penalty``: a token that occurs c > 0 times in the output loses
       ``presence + c * frequency``. A forbidden token's logit becomes -inf. Rounded to float32.
    2. Greedy rows take the largest logit, the lowest id among equals, and are done.
    3. ``temperature`` T: a token's likelihood is ``exp((x - x_max) / T)``.
    4. ``top_k``: the k best tokens stay. ``top_p``: the fewest best tokens stay whose share of
       the likelihood is at least ``top_p``. Tokens tied with the last of them stay as well.
    5. ``min_p``: tokens at least ``min_p`` times as likely as the best stay.
    6. The draw, by noise of (seed, index, number of output tokens) and of nothing else.

    Args:
        num_rows: Rows there are.
        vocab_size: Width of the logits.
        device: Where they are.

    Attributes:
        last_tokens: int64 ``[num_rows]``: the token that each row drew last.
        lengths: int32 ``[num_rows]``: tokens that each row has; less ``PROMPT_LEN`` it is the
            position of the next draw, which adds one.
        ints: int32 ``[num_rows, 5]``: two words of the noise's key, and the columns above.
        floats: float64 ``[num_rows, 7]``: see the columns above. ``INVERSE`` is 1 / temperature,
            negative for greedy rows.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size, self.device = vocab_size, device
        self.last_tokens = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.lengths = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self.ints = torch.zeros(num_rows, 5, dtype=torch.int32, device=device)
        self.floats = torch.zeros(num_rows, 7, dtype=torch.float64, device=device)
        self.features = np.zeros(num_rows, np.int32)
        self._inputs: dict[int, SamplingInput] = {}
        self._tokens = torch.arange(vocab_size, dtype=torch.int32, device=device)
        self._counts = _Counts(vocab_size, device)
        self._tails: dict[int, Tensor] = {}
        self._flat: dict[tuple[str, tuple[int, ...]], tuple[Tensor, ...]] = {}
        self._draw: Any = None
        if device.type == "cuda":
            from .triton import draw

            self._draw = draw

    def start(self, rows: Sequence[int], inputs: Sequence[SamplingInput]) -> None:
        """Load the parameters of rows whose sequences begin or come back."""
        ints = np.zeros((len(rows), 5), np.int64)
        floats = np.zeros((len(rows), 7), np.float64)
        for at, (row, input_) in enumerate(zip(rows, inputs, strict=True)):
            features = find_features(input_.params)
            self.features[row] = features
            self._inputs[row] = input_
            ints[at], floats[at] = _encode(input_, features, self.vocab_size)
            if features & Feature.PENALTY:
                self._counts.load(row, input_)
            if longest := max((len(ids) - 1 for ids in input_.bad_words), default=0):
                tail = [-1] * longest + list(input_.output_token_ids[-longest:])
                self._tails[row] = self._send(tail[-longest:])
        self._flat.clear()
        where = _index(rows, self.device)
        self.ints[where] = send(ints.astype(np.uint32).view(np.int32), self.device)
        self.floats[where] = send(floats, self.device)

    def sample(
        self,
        logits: Tensor,
        rows: Tensor,
        host_rows: Sequence[int],
        masks: Any = None,
        drafts: Sequence[Sequence[int]] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Choose the next token of every row.

        Args:
            logits: ``[n, vocab_size]``, float16, bfloat16 or float32. Not written to.
            rows: int64 ``[n]``, on the device.
            host_rows: The same numbers.
            masks: Of rows with a grammar: pairs of a position in ``rows`` and its int32 mask.
            drafts: For each entry of ``rows`` the tokens that are assumed to follow its last one.
                Then a row may come several times, and none advances: that is ``accept``'s.

        Returns:
            Token ids int64 ``[n]``; the largest logits, float32 ``[n]``, finite where there is a
            token; and, if any row asks for log-probabilities, what ``compute_logprobs`` returns
            for the rows that do.
        """
        host_rows = list(host_rows)
        features = self.features[host_rows]
        present = Feature(int(np.bitwise_or.reduce(features)))
        shaped = logits
        shifts = (
            None if drafts is None else send(np.array([*map(len, drafts)], np.int32), self.device)
        )
        if present & ~(PLAIN | Feature.LOGPROBS) or masks:
            shaped = self._shape(logits.float(), rows, host_rows, features, masks, drafts, shifts)
        tokens, best = self.draw(shaped, rows, features, shifts)
        if drafts is None:
            self._remember(tokens, host_rows)
        if not present & Feature.LOGPROBS:
            return tokens, best, None
        at = np.flatnonzero(features & Feature.LOGPROBS).tolist()
        asked = [self._inputs[host_rows[i]].params.logprobs or 0 for i in at]
        num_top = min(max(asked), self.vocab_size)
        # All rows are not indexed: that would copy the logits.
        where = ... if len(at) == len(features) else _index(at, self.device)
        return tokens, best, compute_logprobs(logits[where], tokens[where], num_top)

    def draw(
        self, logits: Tensor, rows: Tensor, features: Any, shifts: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Steps 2, 3 and 6: token ids int64 ``[n]`` and the largest logits float32 ``[n]``.

        The rows advance by their token.

        Args:
            logits: ``[n, vocab_size]``.
            rows: int64 ``[n]``.
            features: int ``[n]``; rows that are greedy cost no more than that.
            shifts: int32 ``[n]``: positions that each draw lies past its row's next one. With
                them no row advances.
        """
        state: Sampler | _Draws = self
        if shifts is not None:
            state = _Draws(
                self.last_tokens[rows],
                self.lengths[rows] + shifts,
                self.ints[rows],
                self.floats[rows],
            )
            rows = torch.arange(len(shifts), device=self.device)
        if self._draw is not None:
            packed, n = self._draw(logits, rows, state), len(rows)
            return packed[: 2 * n].view(torch.int64), packed[2 * n :].view(torch.float32)
        tokens, best = self._draw_on_host(logits, rows, features, state)
        state.last_tokens[rows] = tokens
        state.lengths[rows] += 1
        return tokens, best

    def accept(self, host_rows: Sequence[int], token_ids: Sequence[int]) -> None:
        """Take note of tokens that ``sample`` chose with drafts, in order; rows may come again."""
        self._remember(self._send(token_ids), host_rows)

    def _remember(self, tokens: Tensor, host_rows: Sequence[int]) -> None:
        """Count the tokens of rows with penalties, and keep those that may begin bad words."""
        features = self.features[host_rows]
        if np.any(features & Feature.PENALTY):
            at = np.flatnonzero(features & Feature.PENALTY).tolist()
            self._counts.add([host_rows[i] for i in at], tokens[_index(at, self.device)])
        if np.any(features & Feature.BAN):
            self._move_tails(tokens, host_rows)

    def _draw_on_host(
        self, logits: Tensor, rows: Tensor, features: Any, state: Sampler | _Draws
    ) -> tuple[Tensor, Tensor]:
        x = logits.float()
        best, tokens = x.max(dim=1)
        drawn = np.flatnonzero(features & Feature.RANDOM)
        if not len(drawn):
            return tokens, best
        at = slice(None) if len(drawn) == len(rows) else _index(drawn, self.device)
        x, top, rows = x[at], best[at], rows[at]
        scale = state.floats[rows, INVERSE].float()[:, None]
        noise = _noise(self._tokens, state.ints[rows], state.lengths[rows])
        found = torch.sub(x, top[:, None]).mul_(scale).sub_(noise.log_()).argmax(dim=1)
        tokens[at] = found
        return tokens.where(torch.isfinite(best), 0), best

    def collect(
        self, tokens: Tensor, best: Tensor, logprobs: Tensor | None, host_rows: Sequence[int]
    ) -> SampledTokens:
        """What ``sample`` returned, brought to the host, for each row."""
        ids, others = tokens.tolist(), {}
        if logprobs is not None:
            asked = [self._inputs[row].params.logprobs for row in host_rows]
            at = [i for i, num_top in enumerate(asked) if num_top is not None]
            num_top = [n for n in asked if n is not None]
            reports = read_logprobs(logprobs, [ids[i] for i in at], num_top)
            others = {i: SampledToken(r.token_id, r) for i, r in zip(at, reports, strict=True)}
        if not torch.isfinite(best).all():
            for i, top in enumerate(best.tolist()):
                if not math.isfinite(top):
                    params = self._inputs[host_rows[i]].params
                    message, error_type = _why_no_token(params, top)
                    others[i] = SampledToken(0, error=message, error_type=error_type)
        return SampledTokens(ids, others)

    def _move_tails(self, tokens: Tensor, host_rows: Sequence[int]) -> None:
        for i, row in enumerate(host_rows):
            if self._inputs[row].bad_words and row in self._tails:
                self._tails[row] = torch.cat([self._tails[row][1:], tokens[i : i + 1]])

    # --- step 1 and the cuts -------------------------------------------------------------

    def _shape(
        self,
        x: Tensor,
        rows: Tensor,
        host_rows: list[int],
        features: Any,
        masks: Any,
        drafts: Sequence[Sequence[int]] | None = None,
        shifts: Tensor | None = None,
    ) -> Tensor:
        """The logits after steps 1, 4 and 5: what is not kept is -inf, NaN and +inf are left."""
        x = x.clone()
        if len(self._flat) > _MOST_FLAT:
            self._flat.clear()

        def having(feature: Feature) -> list[int]:
            return list(np.flatnonzero(features & feature).tolist())

        if at := having(Feature.BIAS):
            where, token_ids, values = self._biases([(i, host_rows[i]) for i in at])
            x[where, token_ids] += values
        if at := having(Feature.PENALTY):
            picked = _index(at, self.device)
            assumed = [drafts[i] for i in at] if drafts is not None else ()
            x[picked] = self._penalise(x[picked], rows[picked], [host_rows[i] for i in at], assumed)
        if at := having(Feature.BAN):
            self._ban(x, rows, [(i, host_rows[i]) for i in at], drafts, shifts)
        if masks:
            at = [i for i, _ in masks]
            words = send(np.stack([mask for _, mask in masks]), self.device)
            # Subtracting infinity, not writing it, leaves a NaN to be found.
            x[_index(at, self.device)] -= self._as_bans(words)
        if at := having(Feature.CUT):
            picked = _index(at, self.device)
            params = [self._inputs[host_rows[i]].params for i in at]
            kept = _cut(x[picked], self.floats[rows[picked]], self.ints[rows[picked]], params)
            x[picked] -= torch.where(kept, 0.0, math.inf)
        return x

    def _biases(self, at: list[tuple[int, int]]) -> tuple[Tensor, ...]:
        key = "bias", tuple(n for pair in at for n in pair)
        if key not in self._flat:
            triples = [
                (i, token_id, bias)
                for i, row in at
                for token_id, bias in dict(self._inputs[row].params.logit_bias or ()).items()
                if token_id < self.vocab_size
            ]
            columns = np.array(triples, np.float64).reshape(-1, 3).T
            where, token_ids = send(columns[:2].astype(np.int64), self.device)
            self._flat[key] = where, token_ids, send(columns[2].astype(np.float32), self.device)
        return self._flat[key]

    def _penalise(
        self, x: Tensor, rows: Tensor, host_rows: list[int], drafts: Sequence[Sequence[int]]
    ) -> Tensor:
        in_output, in_prompt = self._counts.of(host_rows)
        if assumed := [(i, token_id) for i, draft in enumerate(drafts) for token_id in draft]:
            where, token_ids = self._send(assumed).T
            one = torch.ones_like(where, dtype=torch.int32)
            in_output.index_put_((where, token_ids), one, accumulate=True)
        repetition, presence, frequency = self.floats[rows, REPETITION:].T[:, :, None]
        wide = x.double()
        scaled = torch.where(x > 0, wide / repetition, wide * repetition)
        wide = torch.where(in_prompt | (in_output > 0), scaled, wide)
        penalised: Tensor = wide - presence * (in_output > 0) - frequency * in_output
        return penalised.float()

    def _ban(
        self,
        x: Tensor,
        rows: Tensor,
        at: list[tuple[int, int]],
        drafts: Sequence[Sequence[int]] | None,
        shifts: Tensor | None,
    ) -> None:
        """Rule out what is never allowed, end tokens that come too early, and bad words' ends."""
        key = "ban", tuple(n for pair in at for n in pair)
        if key not in self._flat:
            self._flat[key] = self._find_bans(at)
        where, token_ids, until, allowed_at, words = self._flat[key]
        position = self.lengths[rows] - self.ints[rows, PROMPT_LEN]
        if shifts is not None:
            position += shifts
        # Subtracting infinity, not writing it, leaves a NaN to be found.
        x[where, token_ids] -= torch.where(position[where] < until, math.inf, 0.0)
        if len(words):
            x[allowed_at] -= self._as_bans(words)
        for i, row in at:
            tail = self._tails.get(row)
            if tail is not None and drafts is not None and drafts[i]:
                tail = torch.cat([tail, self._send(drafts[i])])
            for *before, last in self._inputs[row].bad_words:
                if before and tail is not None:
                    is_next = (tail[-len(before) :] == self._send(before)).all()
                    x[i, last] -= torch.where(is_next, math.inf, 0.0)

    def _find_bans(self, at: list[tuple[int, int]]) -> tuple[Tensor, ...]:
        until: dict[tuple[int, int], int] = {}
        allowed_at, words = [], []
        for i, row in at:
            input_ = self._inputs[row]
            params = input_.params
            until |= {(i, token_id): params.min_tokens for token_id in input_.end_token_ids}
            until |= {(i, ids[0]): _ALWAYS for ids in input_.bad_words if len(ids) == 1}
            if params.allowed_token_ids is not None:
                allowed_at.append(i)
                words.append(_pack_bits(params.allowed_token_ids, self.vocab_size))
        triples = [(*pair, n) for pair, n in until.items() if 0 <= pair[1] < self.vocab_size]
        where, token_ids, ends = np.array(triples, np.int64).reshape(-1, 3).T.copy()
        masks = np.array(words, np.int32).reshape(len(words), -(-self.vocab_size // 32))
        return (
            *(send(column, self.device) for column in (where, token_ids, ends)),
            _index(allowed_at, self.device),
            send(masks, self.device),
        )

    def _as_bans(self, words: Tensor) -> Tensor:
        """Bit masks int32 ``[n, ceil(vocab_size / 32)]`` as 0 where allowed, else infinity."""
        bits = words[:, (self._tokens >> 5).long()] >> (self._tokens & 31)
        return torch.where((bits & 1) == 1, 0.0, math.inf)

    def _send(self, token_ids: Sequence[Any]) -> Tensor:
        return _index(token_ids, self.device)


def sample(logits: Tensor, rows: Sequence[SamplingInput]) -> list[SampledToken]:
    """Choose the next token of every row: ``Sampler`` for rows that are on the host.

    Args:
        logits: ``[num_rows, vocab_size]``, float16, bfloat16, float32 or float64 (rounded to
            float32), any device. Not written to.
        rows: One per row of ``logits``.

    Returns:
        One ``SampledToken`` per row. A row whose logits hold NaN or +inf, or that forbids every
        token, has ``error`` set; the others are not affected.

    Raises:
        ShapeError: ``logits`` is not a matrix with one row per entry of ``rows``.
        DTypeError: ``logits`` is not floating point of 16, 32 or 64 bits.

    Example:
        >>> logits = torch.tensor([[0.0, 2.0, 1.0], [0.0, 2.0, 1.0]])
        >>> greedy = SamplingInput(SamplingParams(temperature=0.0), [], [], seed=0, index=0)
        >>> drawn = SamplingInput(SamplingParams(logprobs=0), [], [], seed=0, index=0)
        >>> first, second = sample(logits, [greedy, drawn])
        >>> first.token_id, second.token_id, round(second.logprobs.logprob, 4)
        (1, 1, -0.4076)
    """
    num_rows = bind(logits=(logits, "num_rows vocab_size"))["num_rows"]
    if len(rows) != num_rows:
        raise ShapeError(f"logits has num_rows={num_rows} but rows has {len(rows)}: one per row")
    check_dtype("logits", logits, torch.float16, torch.bfloat16, torch.float32, torch.float64)
    if not rows:
        return []
    logits = logits.detach()
    logits = logits.float() if logits.dtype == torch.float64 else logits
    sampler = Sampler(num_rows, logits.shape[1], logits.device)
    numbers = range(num_rows)
    sampler.start(numbers, rows)
    lengths = [len(row.prompt_token_ids) + len(row.output_token_ids) for row in rows]
    sampler.lengths.copy_(send(np.array(lengths, np.int32), logits.device))
    found = sampler.sample(logits, _index(numbers, logits.device), numbers)
    return sampler.collect(*found, numbers).listed()


class _Counts:
    """How often rows with penalties have had each token: kept up to date, not searched for.

    Memory is taken for rows that ask for it: a slot each, doubled when there are none left.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._device = device
        self._slots: dict[int, int] = {}
        self._output = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self._in_prompt = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)

    def load(self, row: int, input_: SamplingInput) -> None:
        slot = self._slots.setdefault(row, len(self._slots))
        if slot == len(self._output):
            self._output, self._in_prompt = (
                torch.cat([t, t.new_zeros(max(4, len(t)), t.shape[1])])
                for t in (self._output, self._in_prompt)
            )
        self._output[slot] = _count(input_.output_token_ids, self._output)
        self._in_prompt[slot] = _count(input_.prompt_token_ids, self._output) > 0

    def of(self, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Occurrences in the output, and whether in the prompt: ``[n, vocab_size]``."""
        where = self._where(rows)
        return self._output[where], self._in_prompt[where]

    def add(self, rows: Sequence[int], tokens: Tensor) -> None:
        """Count one more token of each row; a row may come several times."""
        flat = self._where(rows) * self._output.shape[1] + tokens
        self._output.view(-1).index_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))

    def _where(self, rows: Sequence[int]) -> Tensor:
        return _index([self._slots[row] for row in rows], self._device)


def _count(token_ids: Sequence[int], like: Tensor) -> Tensor:
    """How often each token of the vocabulary occurs: int32 ``[vocab_size]``."""
    ids = np.asarray(token_ids, dtype=np.int64)
    ids = ids[(ids >= 0) & (ids < like.shape[1])]
    counts = np.bincount(ids, minlength=like.shape[1]).astype(np.int32)
    return send(counts, like.device)


def _index(numbers: Sequence[Any] | npt.NDArray[Any], device: torch.device) -> Tensor:
    """Numbers to index with, on the device."""
    return send(np.array(numbers, np.int64), device)


def _encode(
    input_: SamplingInput, features: Feature, vocab_size: int
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """A row of ``Sampler.ints`` and of ``Sampler.floats``."""
    params = input_.params
    # Hexadecimal: Python refuses to print very long integers in decimal.
    digest = hashlib.blake2b(f"{input_.seed:x},{input_.index}".encode(), digest_size=8).digest()
    keys = int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")
    top_k = min(params.top_k or vocab_size, vocab_size)
    is_random = bool(features & Feature.RANDOM)
    # Not so small that float32 rounds it to 0, with which an infinite logit would be NaN.
    inverse = max(1.0 / params.temperature, 1e-30) if is_random else -1.0
    ints = (*keys, len(input_.prompt_token_ids), top_k, params.min_tokens)
    return ints, (
        inverse,
        params.temperature,
        1.0 - params.top_p,
        params.min_p,
        params.repetition_penalty,
        params.presence_penalty,
        params.frequency_penalty,
    )


# --- noise ------------------------------------------------------------------------------------


def _noise(tokens: Tensor, ints: Tensor, lengths: Tensor) -> Tensor:
    """Exponential noise float32 ``[n, vocab_size]``; ``triton.py`` computes the same."""
    position = lengths - ints[:, PROMPT_LEN]
    first = _mix(ints[:, 0] + position * _GOLDEN)
    second = _mix((ints[:, 1] ^ first) + position * _STEP)
    words = _mix(tokens + first[:, None], second[:, None])
    # 31 bits as a number in (0, 1); as 1 - u they keep all digits where the winner is: near 0.
    uniform = words.bitwise_and_(0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31)
    return uniform.clamp_(max=1 - 2.0**-24).neg_().log1p_().neg_()


def _mix(x: Tensor, key: Tensor | int = 0) -> Tensor:
    """A hash of 32 bits, one to one (Wellons' ``lowbias32``, with a key); writes to ``x``."""
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(_MIX_A)
    x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF)).add_(key).mul_(_MIX_B)
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))


def _signed(word: int) -> int:
    return word - 2**32 if word >= 2**31 else word


_MIX_A, _MIX_B = 0x7FEB352D, _signed(0x846CA68B)
_GOLDEN, _STEP = _signed(0x9E3779B9), _signed(0x85EBCA6B)
_ALWAYS = 2**31 - 1
_MOST_FLAT = 64  # drafts lay the same rows out in many ways


# --- cuts -------------------------------------------------------------------------------------


def _cut(x: Tensor, floats: Tensor, ints: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Which tokens steps 4 and 5 keep: bool like ``x``. A cut that is not asked for keeps all."""
    best = x.amax(dim=1)
    units = _units(x, best, floats[:, TEMPERATURE, None])
    kept = torch.ones_like(x, dtype=torch.bool)
    if any(p.top_k for p in params):
        kept = _is_kept(x, torch.ones_like(units), ints[:, TOP_K, None].long())
        units *= kept
    if any(p.top_p < 1.0 for p in params):
        total = units.sum(dim=1, keepdim=True)
        need = (total - (floats[:, TAIL, None] * total).long()).clamp_(min=1)
        kept &= _is_kept(x, units, need)
    if any(p.min_p for p in params):
        kept &= units >= floats[:, MIN_P, None] * ONE
    return kept


def _units(logits: Tensor, best: Tensor, temperature: Tensor | float) -> Tensor:
    """``exp((logits - best) / temperature)`` in units of 1 / ONE, int64 ``[num_rows, vocab]``."""
    exponent = logits.double().sub_(best.double()[:, None]).div_(temperature)
    return exponent.exp_().mul_(ONE).round_().long()


def _is_kept(logits: Tensor, amounts: Tensor, need: Tensor) -> Tensor:
    """Which tokens are among the fewest best whose ``amounts`` sum to ``need``, ties included.

    Each round knows the leading digits of the edge and histograms the next one. Bucket 0 takes
    all tokens better than those leading digits, the last bucket all worse ones.
    """
    order = descending_order(logits)
    num_buckets = 2**DIGIT_BITS + 2
    first = torch.full_like(need, -(2**31) >> 2 * DIGIT_BITS)  # what bucket 1 stands for
    for shift in (2 * DIGIT_BITS, DIGIT_BITS, 0):
        bucket = ((order >> shift) - (first - 1)).clamp_(0, num_buckets - 1)
        histogram = amounts.new_zeros(len(order), num_buckets).scatter_add_(1, bucket, amounts)
        reached = torch.searchsorted(histogram.cumsum(dim=1), need)
        edge = first + reached - 1
        first = edge << DIGIT_BITS
    return order <= edge.int()


def _why_no_token(params: SamplingParams, best: float) -> tuple[str, type[GenerationError]]:
    """The error of a row whose largest logit ``best`` is not finite, and the error's type.

    It is ``NoTokenLeftError`` where the request's own parameters are to blame.
    """
    restricts = params.structured_outputs or params.allowed_token_ids or params.bad_words
    if best == -math.inf and restricts:
        message = (
            "the request's parameters leave no token: structured_outputs, allowed_token_ids, "
            "bad_words and min_tokens together forbid every token"
        )
        return message, NoTokenLeftError
    if best == math.inf and params.repetition_penalty != 1.0:
        message = (
            f"the request's parameters leave no token: "
            f"repetition_penalty={params.repetition_penalty} makes logits infinite"
        )
        return message, NoTokenLeftError
    message = (
        f"the largest logit is {best}, expected a finite one: -inf means that every token is "
        "forbidden; otherwise check the weights and the dtype (float16 overflows at 65504)"
    )
    return message, GenerationError


def _pack_bits(token_ids: Sequence[int], vocab_size: int) -> npt.NDArray[Any]:
    """Token ids as an int32 mask ``[ceil(vocab_size / 32)]``."""
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[[token_id for token_id in token_ids if token_id < vocab_size]] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)
