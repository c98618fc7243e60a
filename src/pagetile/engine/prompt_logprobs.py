"""Log-probabilities of a prompt's own tokens, by a forward pass between the engine's steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import GenerationError
from ..kv_cache import BlockTable
from ..models.forward_batch import ForwardBatch
from .logprobs import LogprobDicts, TokenLogprobs, compute_logprobs, read_logprobs
from .output_processor import fail
from .outputs import Delta

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Sequence

    from .core import Engine
    from .request import Sequence as OneSequence

CHUNK = 256  # tokens of one forward: their logits are float32 [CHUNK, vocab_size]


def score_next(engine: Engine, waiting: deque[OneSequence], deltas: list[Delta]) -> bool:
    """Compute the log-probabilities of the first waiting prompt, and queue or end its sequence.

    Args:
        engine: The engine, between two steps.
        waiting: Sequences whose prompts are to be scored.
        deltas: Gets the last deltas of a request that ends here.

    Returns:
        Whether other sequences may start. They may not while blocks for this one are lacking, or
        small prompts would take each block that becomes free.
    """
    sequence, scheduler = waiting[0], engine.scheduler
    if not score_prompt(engine, sequence):
        return not (scheduler.running or scheduler.ended)
    waiting.popleft()
    request, error = sequence.request, sequence.error
    if request.generates and error is None:
        scheduler.add(sequence)
        return True
    for sample in (sequence, *engine.add_samples(request)):
        if error is not None:
            deltas.append(fail(sample, error))
        else:
            deltas.append(Delta(request.request_id, sample.index, "", None, "length"))
        scheduler.finish(sample, "length" if error is None else "error")
    return True


@torch.inference_mode()
def score_prompt(engine: Engine, sequence: OneSequence) -> bool:
    """Compute a request's ``prompt_logprobs``; a failure becomes its sequence's ``error``.

    It allocates blocks of the engine's pool during the call, and does not use the prefix cache.
    Call it between two steps, on the thread that steps.

    Returns:
        False if the pool has too few free blocks now.
    """
    request, table = sequence.request, BlockTable(engine.pool)
    token_ids, num_top = request.prompt_token_ids, request.params.prompt_logprobs or 0
    if not engine.pool.can_allocate(table.blocks_needed(len(token_ids))):
        return False
    table.append(len(token_ids))
    try:
        scores: list[TokenLogprobs | None] = [None]  # nothing predicts the first
        chunk = min(CHUNK, engine.model.max_step_tokens or CHUNK)
        for start in range(0, len(token_ids), chunk):
            end = min(start + chunk, len(token_ids))
            step = ForwardBatch.of(
                [token_ids[start:end]], [table.blocks], [end],
                block_size=engine.pool.block_size, device=engine.model.device,
            )  # fmt: skip
            logits = engine.model.forward(step)
            targets = token_ids[start + 1 : end + 1]
            if targets:
                scores += _score(logits[: len(targets)], targets, num_top)
        request.prompt_logprobs = LogprobDicts(scores, engine.decode_token)
    except Exception as error:
        problem = f"its prompt's scores failed: {type(error).__name__}: {error}"
        sequence.error = GenerationError(problem)
    finally:
        table.free()
    return True


def _score(logits: Tensor, targets: Sequence[int], num_top: int) -> list[TokenLogprobs | None]:
    num_top = min(num_top, logits.shape[1])
    at = torch.tensor(targets, device=logits.device)
    packed = compute_logprobs(logits, at, num_top).cpu()
    return read_logprobs(packed, targets, [num_top] * len(targets))
