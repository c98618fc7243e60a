"""``sample``: one draw for rows that are on the host, without an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pagetile.engine.logprobs import TokenLogprobs
from pagetile.engine.sampler import Sampler
from pagetile.engine.sampling_rows import SamplingInput
from pagetile.engine.step import SampledTokens
from pagetile.errors import GenerationError, ShapeError
from pagetile.shapes import bind, check_dtype
from pagetile.transfer import send


class SampledToken(NamedTuple):
    """What a row gets: a token, perhaps with its log-probabilities, or an error."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    error: str | None = None
    error_type: type[GenerationError] = GenerationError


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

    Examples:
        >>> from pagetile import SamplingParams
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
    where = torch.arange(num_rows, device=logits.device)
    results = sampler.sample(logits, where, numbers)
    if logits.is_cuda:
        torch.cuda.synchronize()
    return list_tokens(sampler.collect(results, numbers))


def list_tokens(found: SampledTokens) -> list[SampledToken]:
    """One ``SampledToken`` a row."""
    return [
        SampledToken(0, None, str(found.errors[at]), type(found.errors[at]))
        if at in found.errors
        else SampledToken(token_id, found.logprobs.get(at))
        for at, token_id in enumerate(found.token_ids)
    ]
