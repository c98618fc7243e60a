"""From logits to tokens: penalties, temperature, top-k, top-p, min-p, and one draw.

Sampling runs on integers. After the temperature a token's likelihood is a whole number of units,
2**40 of them for the likeliest, and all that follows (the sums, the edges of top-k and top-p, the
draw) is exact arithmetic on such numbers. Exact sums come out the same in any order, so a row
gives the same token alone or among others, whatever the shape of the batch. What is less than
2**-41 times as likely as the favourite rounds to nothing.

The edge of top-k and top-p is found without sorting, digit by digit: a histogram over the leading
11 bits of the tokens' order shows in which bucket the edge lies, a second one looks inside that
bucket, a third settles it::

    need 70 units, best tokens first
    bucket    0    1    2    3   ...
    units    40   20   25   10          40 + 20 < 70 <= 40 + 20 + 25: the edge is in bucket 2
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..errors import ShapeError
from ..shapes import bind, check_dtype
from ..transfer import send
from .sampling_params import SamplingParams

__all__ = ["SampledToken", "SamplingInput", "sample"]

ONE = 2**40  # units of the likeliest token: 2**23 tokens still sum below 2**63
DIGIT_BITS = 11  # three digits cover the 32 bits of a float's order
ID_BITS = 31


@dataclasses.dataclass(frozen=True, slots=True)
class SamplingInput:
    """One row of the batch: a sequence about to get its next token.

    Token ids outside the vocabulary (a prompt's image placeholders, say) are ignored.
    """

    params: SamplingParams
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    seed: int  # params.seed, or the one that the engine drew
    index: int  # which of the request's n samples
    forbidden_token_ids: Sequence[int] = ()


class SampledToken(NamedTuple):
    """The next token of one row.

    Log-probabilities are those of the model: of the logits as they came, before penalties,
    temperature and cuts.
    """

    token_id: int
    logprob: float | None = None  # if params.logprobs is not None
    top_logprobs: tuple[tuple[int, float], ...] = ()  # (token id, logprob), best first
    error: str | None = None  # why the row has no token; token_id is 0 then


def sample(logits: Tensor, rows: Sequence[SamplingInput]) -> list[SampledToken]:
    """Choose the next token of every row.

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
    6. The draw: with u from [0, 1), a function of (seed, index, number of output tokens) and of
       nothing else, the first token whose running likelihood exceeds u times the total.

    So a row's token depends on that row alone, and a recomputed step repeats itself.

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
        >>> first.token_id, second.token_id, round(second.logprob, 4)
        (1, 2, -1.4076)
    """
    num_rows = bind(logits=(logits, "num_rows vocab_size"))["num_rows"]
    if len(rows) != num_rows:
        raise ShapeError(f"logits has num_rows={num_rows} but rows has {len(rows)}: one per row")
    check_dtype("logits", logits, torch.float16, torch.bfloat16, torch.float32, torch.float64)
    if not rows:
        return []

    raw = logits.detach().float()
    shaped = _penalise(raw, rows)
    best, token_ids = shaped.max(dim=1)
    drawn = [i for i, row in enumerate(rows) if not row.params.is_greedy]
    cut = [i for i in drawn if (p := rows[i].params).top_k or p.top_p < 1.0 or p.min_p]
    for group in filter(None, (cut, sorted({*drawn} - {*cut}))):
        at = _rows(group, raw)
        token_ids[at] = _draw(shaped.index_select(0, at), best[at], [rows[i] for i in group])

    # float64 holds every id and float32 exactly: one table, one transfer to the host.
    columns = [torch.stack([token_ids.double(), best.double()], dim=1)]
    if any(row.params.logprobs is not None for row in rows):
        columns.append(_logprobs(raw, token_ids, rows))
    table: list[list[float]] = torch.cat(columns, dim=1).tolist()
    return [_sampled_token(*entry) for entry in zip(rows, table, strict=True)]


def _sampled_token(row: SamplingInput, entry: list[float]) -> SampledToken:
    token_id, best, *reported = entry
    if not math.isfinite(best):
        error = (
            f"the largest logit is {best}, expected a finite one: -inf means that every token is "
            "forbidden; otherwise check the weights and the dtype (float16 overflows at 65504)"
        )
        return SampledToken(0, error=error)
    if row.params.logprobs is None:
        return SampledToken(int(token_id))
    pairs = zip(reported[1::2], reported[2::2], strict=True)
    top = [(int(top_id), logprob) for top_id, logprob in pairs]
    return SampledToken(int(token_id), reported[0], tuple(top[: row.params.logprobs]))


def _penalise(logits: Tensor, rows: Sequence[SamplingInput]) -> Tensor:
    """The logits after step 1; the same tensor when no row asks for anything."""
    params = [row.params for row in rows]
    penalties = [(p.repetition_penalty, p.presence_penalty, p.frequency_penalty) for p in params]
    at = [i for i, given in enumerate(penalties) if given != (1.0, 0.0, 0.0)]
    biased = [i for i, row in enumerate(rows) if row.params.logit_bias]
    barred = [i for i, row in enumerate(rows) if row.forbidden_token_ids]
    if not (at or biased or barred):
        return logits

    logits = logits.clone()
    if biased:
        _add_bias(logits, biased, rows)
    if at:
        repetition, presence, frequency = _columns([penalties[i] for i in at], logits)
        in_output = _count([rows[i].output_token_ids for i in at], logits)
        in_prompt = _count([rows[i].prompt_token_ids for i in at], logits)
        where = _rows(at, logits)
        x = logits[where].double()
        scaled = torch.where(x > 0, x / repetition, x * repetition)
        x = torch.where(in_prompt + in_output > 0, scaled, x)
        logits[where] = (x - presence * (in_output > 0) - frequency * in_output).float()
    if barred:
        is_barred = _count([rows[i].forbidden_token_ids for i in barred], logits) > 0
        # Subtracting infinity, not writing it, leaves a NaN to be found.
        logits[_rows(barred, logits)] -= torch.where(is_barred, math.inf, 0.0)
    return logits


def _add_bias(logits: Tensor, biased: Sequence[int], rows: Sequence[SamplingInput]) -> None:
    triples = [
        (i, token_id, bias)
        for i in biased
        for token_id, bias in dict(rows[i].params.logit_bias or ()).items()
        if token_id < logits.shape[1]
    ]
    columns = np.array(triples, np.float64).reshape(-1, 3).T
    row, token = send(columns[:2].astype(np.int64), logits.device)
    logits[row, token] += send(columns[2].astype(np.float32), logits.device)


def _count(rows: Sequence[Sequence[int]], like: Tensor) -> Tensor:
    """How often each token occurs in each row: int32 ``[len(rows), vocab_size]``."""
    vocab_size = like.shape[1]
    flat = []
    for i, token_ids in enumerate(rows):
        ids = np.asarray(token_ids, dtype=np.int64)
        flat.append(ids[(ids >= 0) & (ids < vocab_size)] + i * vocab_size)
    at = send(np.concatenate(flat), like.device)
    counts = torch.zeros(len(rows) * vocab_size, dtype=torch.int32, device=like.device)
    return counts.index_add_(0, at, torch.ones_like(at, dtype=torch.int32)).view(-1, vocab_size)


def _draw(logits: Tensor, best: Tensor, rows: Sequence[SamplingInput]) -> Tensor:
    """Steps 3 to 6: the ids, int64 ``[num_rows]``. A cut that a row did not ask for keeps all."""
    params = [row.params for row in rows]
    vocab_size = logits.shape[1]
    temperature, top_k, tail, min_p, uniform = _columns(
        [
            (
                p.temperature,
                min(p.top_k or vocab_size, vocab_size),
                1.0 - p.top_p,
                p.min_p,
                _uniform(row.seed, row.index, len(row.output_token_ids)),
            )
            for p, row in zip(params, rows, strict=True)
        ],
        logits,
    )
    units = _units(logits, best, temperature)
    if any(p.top_k for p in params):
        units *= _is_kept(logits, torch.ones_like(units), top_k.long())
    if any(p.top_p < 1.0 for p in params):
        total = units.sum(dim=1, keepdim=True)
        units *= _is_kept(logits, units, (total - (tail * total).long()).clamp_(min=1))
    if any(p.min_p for p in params):
        units *= units >= min_p * ONE

    running = units.cumsum(dim=1)
    target = (uniform * running[:, -1:]).long()
    # A row of NaN may point past the end; it is reported, not followed.
    return torch.searchsorted(running, target, right=True)[:, 0].clamp_(max=vocab_size - 1)


def _columns(rows: Sequence[Sequence[float]], like: Tensor) -> Tensor:
    """What each row has several numbers of, as float64 columns ``[numbers, num_rows, 1]``."""
    return send(np.array(rows, np.float64), like.device).T[:, :, None]


def _rows(numbers: Sequence[int], like: Tensor) -> Tensor:
    """Row numbers to index ``like`` with."""
    return send(np.array(numbers, np.int64), like.device)


def _units(logits: Tensor, best: Tensor, temperature: Tensor | float) -> Tensor:
    """``exp((logits - best) / temperature)`` in units of 1 / ONE, int64 ``[num_rows, vocab]``."""
    exponent = logits.double().sub_(best.double()[:, None]).div_(temperature)
    return exponent.exp_().mul_(ONE).round_().long()


def _order(logits: Tensor) -> Tensor:
    """Integers that ascend as the logits descend, equal for equal logits: int32, same shape."""
    bits = (logits + 0.0).view(torch.int32)  # -0.0 + 0.0 is 0.0
    return (bits >> 31).bitwise_and_(0x7FFFFFFF).bitwise_xor_(bits).bitwise_not_()


def _is_kept(logits: Tensor, amounts: Tensor, need: Tensor) -> Tensor:
    """Which tokens are among the fewest best whose ``amounts`` sum to ``need``, ties included.

    Each round knows the leading digits of the edge and histograms the next one. Bucket 0 takes
    all tokens better than those leading digits, the last bucket all worse ones.
    """
    order = _order(logits)
    num_buckets = 2**DIGIT_BITS + 2
    first = torch.full_like(need, -(2**31) >> 2 * DIGIT_BITS)  # what bucket 1 stands for
    for shift in (2 * DIGIT_BITS, DIGIT_BITS, 0):
        bucket = ((order >> shift) - (first - 1)).clamp_(0, num_buckets - 1)
        histogram = amounts.new_zeros(len(order), num_buckets).scatter_add_(1, bucket, amounts)
        reached = torch.searchsorted(histogram.cumsum(dim=1), need)
        edge = first + reached - 1
        first = edge << DIGIT_BITS
    return order <= edge.int()


def _uniform(seed: int, index: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits that depends on nothing but the arguments."""
    # Hexadecimal: Python refuses to print very long integers in decimal.
    digest = hashlib.blake2b(f"{seed:x},{index},{position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def _logprobs(raw: Tensor, token_ids: Tensor, rows: Sequence[SamplingInput]) -> Tensor:
    """Columns for the host, float64: the token's logprob; id and logprob of the best, in turn."""
    at = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
    num_top = min(max(rows[i].params.logprobs or 0 for i in at), raw.shape[1])
    where = _rows(at, raw)
    logits = raw[where]
    best = logits.amax(dim=1)
    total = _units(logits, best, 1.0).sum(dim=1).double() / ONE
    log_total = (total.log() + best)[:, None]
    # The id in the low bits settles ties, whatever num_top the neighbours ask for.
    keys = (_order(logits).long() << ID_BITS) + torch.arange(logits.shape[1], device=raw.device)
    top_ids = keys.topk(num_top, largest=False).values & (2**ID_BITS - 1)
    ids = torch.cat([token_ids[where][:, None], top_ids], dim=1)
    logprobs = logits.gather(1, ids) - log_total
    columns = torch.zeros(len(rows), 1 + 2 * num_top, dtype=torch.float64, device=raw.device)
    pairs = torch.stack([top_ids.double(), logprobs[:, 1:]], dim=2)
    columns[where] = torch.cat([logprobs[:, :1], pairs.flatten(1)], dim=1)
    return columns
