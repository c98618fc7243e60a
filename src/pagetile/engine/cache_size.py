"""How large an engine's cache is, and of what elements."""

from __future__ import annotations

import torch

from ..device import available_memory
from ..errors import OutOfBlocksError, RequestError
from ..kv_cache import BlockPool
from ..kv_cache.storage import KVCache
from ..models.paged_model import PagedModel

__all__ = ["cache_dtype", "make_cache"]

_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "int8": torch.int8,
}


def cache_dtype(name: torch.dtype | str) -> torch.dtype | None:
    """The element type that a user names; ``None`` for ``"auto"``, that of the weights.

    Raises:
        RequestError: Caches have no such elements.
    """
    if isinstance(name, str) and name == "auto":
        return None
    if isinstance(name, torch.dtype) and name in _DTYPES.values():
        return name
    if not isinstance(name, str) or name not in _DTYPES:
        raise RequestError(
            f"kv_cache_dtype={name!r}: expected 'auto', {', '.join(map(repr, _DTYPES))}"
        )
    return _DTYPES[name]


def make_cache(
    model: PagedModel,
    dtype: torch.dtype,
    *,
    block_size: int,
    num_blocks: int | None,
    memory_fraction: float,
    max_num_seqs: int,
    max_model_len: int | None,
) -> KVCache:
    """A model's cache; see ``LLM`` for the arguments.

    Raises:
        OutOfBlocksError: It would not fit into memory, or not hold ``max_model_len`` tokens.
    """
    if num_blocks is None:
        longest = max_model_len or model.max_model_len
        num_blocks = _fit(model, dtype, block_size, memory_fraction, max_num_seqs, longest)
    else:
        _check_memory(model, dtype, block_size, num_blocks)
    if max_model_len is not None and num_blocks * block_size < max_model_len:
        raise OutOfBlocksError(
            f"the cache holds {num_blocks * block_size} tokens ({num_blocks} blocks of "
            f"{block_size}), fewer than max_model_len={max_model_len}: use at least "
            f"{-(-max_model_len // block_size)} blocks, or a smaller max_model_len"
        )
    return KVCache(
        model.layers,
        BlockPool(num_blocks, block_size),
        dtype=dtype,
        device=model.device,
    )


def _fit(
    model: PagedModel,
    dtype: torch.dtype,
    block_size: int,
    fraction: float,
    max_num_seqs: int,
    longest: int | None,
) -> int:
    memory = int(available_memory(model.device) * fraction)
    fitting = KVCache.blocks_that_fit(model.layers, memory, block_size=block_size, dtype=dtype)
    if longest is None:
        return fitting
    return min(fitting, max_num_seqs * -(-longest // block_size))


def _check_memory(model: PagedModel, dtype: torch.dtype, block_size: int, num_blocks: int) -> None:
    free = available_memory(model.device)
    fitting = KVCache.blocks_that_fit(model.layers, free, block_size=block_size, dtype=dtype)
    if num_blocks > fitting:
        raise OutOfBlocksError(
            f"num_blocks={num_blocks:,} of {block_size} tokens do not fit into the {free:,} bytes "
            f"that are free on {model.device}: use at most {fitting:,}"
        )
