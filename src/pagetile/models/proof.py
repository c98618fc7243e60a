"""Checks at load that a model's logits over a paged cache equal those of its own eager forward.

Two short sequences, packed and chunked as in an engine, with blocks in mixed order::

    step            1  first chunk     2  later chunk    3  decode
    sequence A      0 … 6              7 … 12            13
    sequence B      0 … 7              8                 9

If anything but the cache carries information from earlier tokens (a recurrent state, a position
counted inside the model, a mask), the second or third step differs. On a GPU the first chunk has 80
tokens and the second 11, because fused layers use different kernels for more than 64 tokens, for
more than 4, and for fewer.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..errors import UnsupportedError
from ..kv_cache import BlockPool
from ..kv_cache.storage import KVCache
from .attention import collect_configs, driven
from .forward_batch import ForwardBatch
from .module_attention import find_reference

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .paged_model import PagedModel

TOLERANCES = {torch.float64: 1e-4, torch.float32: 1e-4, torch.float16: 0.03, torch.bfloat16: 0.1}
"""Tolerance of logits, relative to the spread of a token's logits.

In 16-bit types half of a step's tokens must keep to it, otherwise all: a systematic error affects
every token, but rounding that changes the choice of an expert affects only some.
"""

_WORST = 0.5
"""Largest tolerance, whatever rounding does to a model; beyond it a comparison is meaningless."""

_PHASES = ("first chunk", "later chunk", "decode")
_BLOCK_SIZE = 4
_LONG, _LONG_FIRST = 83, 72
"""The longer sequence on a GPU, and its first chunk."""


def make_sequences(model: PreTrainedModel, max_model_len: int | None) -> tuple[Tensor, Tensor]:
    """Return two sequences' token ids, as long as the check needs or the model supports."""
    wanted = _LONG if model.device.type == "cuda" else 14
    longest = max_model_len or wanted
    vocab_size = model.get_input_embeddings().num_embeddings
    token_ids: Tensor = torch.arange(1, wanted + 11, device=model.device) * 7919 % vocab_size
    return token_ids[: min(wanted, longest)], token_ids[wanted : wanted + min(10, longest)]


@torch.no_grad()
def prove(
    paged: PagedModel,
    model: PreTrainedModel,
    modules: Sequence[nn.Module],
    sequences: tuple[Tensor, Tensor],
) -> None:
    """Raise UnsupportedError unless the paged model gives the logits of the model itself.

    Args:
        paged: The model over a paged cache. No cache is bound to it afterwards.
        model: The same model as Transformers runs it.
        modules: Its attention modules.
        sequences: Token ids, each ``[length]`` with at least 3 tokens.
    """
    expected = [_run_eager(model, sequence) for sequence in sequences]
    tolerance = _find_tolerance(model, modules, sequences, expected)
    tables = _lay_out(paged, sequences)
    num_done = [0, 0]
    for phase, counts in zip(_PHASES, _cut(*map(len, sequences)), strict=True):
        ends = [at + n for at, n in zip(num_done, counts, strict=True)]
        parts = [slice(at, end) for at, end in zip(num_done, ends, strict=True)]
        new = [ids[part].tolist() for ids, part in zip(sequences, parts, strict=True)]
        logits = paged.forward(
            ForwardBatch.of(new, tables, ends, block_size=_BLOCK_SIZE, device=paged.device)
        )
        wanted = torch.cat([rows[part] for rows, part in zip(expected, parts, strict=True)])
        _compare(phase, _row_errors(logits, wanted), model.dtype, tolerance)
        num_done = ends
    paged.bind(None)


def _run_eager(model: PreTrainedModel, token_ids: Tensor) -> Tensor:
    """Return logits ``[length, vocab_size]`` of a whole sequence, by the model's own code."""
    with driven(collect_configs(model), find_reference(model)):
        output = model(input_ids=token_ids[None], use_cache=False, return_dict=True)
    logits: Tensor = output.logits[0]
    return logits


def _row_errors(logits: Tensor, expected: Tensor) -> Tensor:
    """Return the error of each token's logits, relative to their spread over the vocabulary."""
    expected = expected.float()
    spread = (expected - expected.mean(-1, keepdim=True)).norm(dim=-1)
    errors: Tensor = (logits.float() - expected).norm(dim=-1) / spread.clamp_min(1e-30)
    return errors


def _find_tolerance(
    model: PreTrainedModel,
    modules: Sequence[nn.Module],
    sequences: tuple[Tensor, Tensor],
    expected: list[Tensor],
) -> float:
    """Return the largest error that rounding can explain, by the type or as measured.

    It is measured by rounding the output of every attention module once more. Where that changes a
    router's choice of experts, the error is far larger than any formula would allow.
    """
    generator = torch.Generator(model.device).manual_seed(0)

    def disturb(module: nn.Module, inputs: object, output: Any) -> Any:
        first, *rest = (output,) if isinstance(output, Tensor) else output
        noise = torch.randn(first.shape, generator=generator, device=first.device)
        first = (first.float() * (1 + torch.finfo(model.dtype).eps * noise)).to(first.dtype)
        return first if isinstance(output, Tensor) else (first, *rest)

    with ExitStack() as hooks:
        for module in modules:
            hooks.enter_context(module.register_forward_hook(disturb))
        disturbed = [_run_eager(model, sequence) for sequence in sequences]
    rounding = float(_row_errors(torch.cat(disturbed), torch.cat(expected)).median())
    return min(max(TOLERANCES[model.dtype], 8 * rounding), _WORST)


def _cut(long: int, short: int) -> list[tuple[int, int]]:
    """New tokens of both sequences in each step."""
    first = _LONG_FIRST if long == _LONG else long // 2
    return [(first, short - 2), (long - first - 1, 1), (1, 1)]


def _lay_out(paged: PagedModel, sequences: tuple[Tensor, Tensor]) -> list[range]:
    """Bind a small cache full of NaN, with block tables in unsorted order."""
    width = -(-max(len(s) for s in sequences) // _BLOCK_SIZE)
    num_blocks = 2 * width + 1
    cache = KVCache(
        paged.layers, BlockPool(num_blocks, _BLOCK_SIZE), dtype=paged.dtype, device=paged.device
    )
    for blocks in (*cache.k, *cache.v):
        blocks.fill_(torch.nan)
    paged.bind(cache)
    return [range(num_blocks - 1 - seq, 0, -2) for seq in range(2)]


def _compare(phase: str, errors: Tensor, dtype: torch.dtype, tolerance: float) -> None:
    error = float(errors.max() if dtype.itemsize >= 4 else errors.median())
    if not error <= tolerance:  # NaN, too
        raise UnsupportedError(
            f"its logits differ from those of its own eager forward ({phase}: relative error "
            f"{error:.1e}, at most {tolerance:.1e} expected). Something beside keys and values "
            "passes from token to token, or its attention computes what it does not tell"
        )
