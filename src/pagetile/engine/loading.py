"""Makes an engine of ``LLM``'s options, which are validated before anything large is loaded."""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING, Any

import torch

from ..device import available_memory, default_device
from ..errors import OutOfBlocksError, RequestError, UnsupportedError
from ..kv_cache import BlockPool
from ..kv_cache.storage import KVCache
from ..models.paged_model import PagedModel
from .checks import check, integer, number
from .core import Engine
from .generation_config import sampling_defaults
from .sampling_params import SamplingParams
from .warming import warm_up

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "int8": torch.int8,
}


def load_engine(
    model: str | os.PathLike[str] | Any,
    *,
    tokenizer: str | os.PathLike[str] | PreTrainedTokenizerBase | None,
    device: torch.device | str | None,
    dtype: torch.dtype | str,
    block_size: int,
    num_blocks: int | None,
    memory_fraction: float,
    max_num_seqs: int,
    max_num_batched_tokens: int | None,
    max_model_len: int | None,
    kv_cache_dtype: torch.dtype | str,
    enable_prefix_caching: bool,
    enforce_eager: bool,
    async_scheduling: bool | None,
    speculative: str | None,
    num_speculative_tokens: int | None,
    generation_config: str,
    seed: int,
    use_tqdm: bool,
) -> tuple[Engine, SamplingParams]:
    """Return an engine, and the parameters of requests that are given none: see ``LLM``."""
    _require_transformers()
    from ..models import load_model

    if model is None:
        from ..demo import path

        model = path()
    fraction = number(
        "memory_fraction", memory_fraction, "a number in (0, 1]", 0.0, 1.0, open_low=True
    )
    block_size = _size("block_size", block_size, most=256)
    max_num_seqs = _size("max_num_seqs", max_num_seqs, most=1 << 16)
    num_blocks = _size_if_given("num_blocks", num_blocks)
    max_num_batched_tokens = _size_if_given(
        "max_num_batched_tokens", max_num_batched_tokens, least=max_num_seqs
    )
    max_model_len = _size_if_given("max_model_len", max_model_len)
    num_speculative_tokens = _size_if_given(
        "num_speculative_tokens", num_speculative_tokens, most=15
    )
    seed = integer("seed", seed, "a whole number")
    for name, switch in (
        ("enable_prefix_caching", enable_prefix_caching), ("enforce_eager", enforce_eager),
        ("async_scheduling", async_scheduling or False), ("use_tqdm", use_tqdm),
    ):  # fmt: skip
        check(isinstance(switch, bool), name, switch, "True or False")
    check(speculative in (None, "ngram"), "speculative", speculative, "'ngram' or None")
    has_use = speculative is not None or num_speculative_tokens is None
    check(has_use, "num_speculative_tokens", num_speculative_tokens, "speculative='ngram' too")
    known = generation_config in ("auto", "vllm")
    check(known, "generation_config", generation_config, "'auto' or 'vllm'")
    cache_type = _cache_dtype(kv_cache_dtype)

    directory = model if isinstance(model, (str, os.PathLike)) else None
    default_params = _default_params(directory, generation_config)
    device = _find_device(directory, device)
    dtype = _find_dtype(directory, device, dtype)
    tokenizer = _find_tokenizer(tokenizer, directory)
    paged = load_model(model, dtype=dtype, device=device, max_model_len=max_model_len)
    cache = _make_cache(
        paged,
        cache_type or paged.dtype,
        block_size=block_size,
        num_blocks=num_blocks,
        memory_fraction=fraction,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
    )
    longest = max_model_len or paged.max_model_len or cache.num_tokens
    engine = Engine(
        paged,
        cache,
        tokenizer,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=_find_step_tokens(paged, max_num_seqs, max_num_batched_tokens),
        max_model_len=min(longest, cache.num_tokens),
        enable_prefix_caching=enable_prefix_caching,
        enforce_eager=enforce_eager,
        async_scheduling=async_scheduling,
        num_speculative_tokens=(num_speculative_tokens or 7) if speculative else 0,
        seed=seed,
    )
    _engines.add(engine)
    if not enforce_eager:
        warm_up(engine, _show_progress if use_tqdm else iter)
    return engine, default_params


_engines = weakref.WeakSet[Engine]()


def _end_copies() -> None:
    """End the engines that a fork has copied: each would wait for threads that it does not have."""
    for engine in _engines:
        engine.death = RuntimeError(
            "it was loaded before this process was forked, and a fork copies no threads: load it "
            "here, or use the start method 'spawn'"
        )


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_end_copies)


def _show_progress(recordings: list[Any]) -> Any:
    from tqdm import tqdm

    return tqdm(recordings, desc="Recording steps", unit="size")


def _require_transformers() -> None:
    try:
        import transformers  # noqa: F401
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            f"LLM needs the package {error.name}, which is not installed: "
            "pip install 'pagetile[engine]', or in a checkout pip install -e '.[engine]'"
        ) from error


def _default_params(
    directory: str | os.PathLike[str] | None, generation_config: str
) -> SamplingParams:
    """Return the parameters that a checkpoint recommends, where these are asked for."""
    if directory is None or generation_config != "auto":
        return SamplingParams()
    return SamplingParams(**sampling_defaults(directory))  # type: ignore[arg-type]


def _find_device(
    directory: str | os.PathLike[str] | None, device: torch.device | str | None
) -> torch.device | str | None:
    """Return the device to load a model to; ``None`` for a loaded one that stays where it is."""
    if device is None:
        return None if directory is None else default_device()
    try:
        torch.device(device)
    except (RuntimeError, TypeError):
        raise RequestError(
            f"device={device!r}: expected the name of a torch device, such as 'cpu', 'cuda' or "
            "'cuda:1'"
        ) from None
    return device


def _find_dtype(
    directory: str | os.PathLike[str] | None,
    device: torch.device | str | None,
    dtype: torch.dtype | str,
) -> torch.dtype | str:
    """Return the type of the weights: "auto" is float32 for float16 checkpoints on a CPU."""
    from ..models.loading import read_config

    on_cpu = device is not None and torch.device(device).type == "cpu"
    if dtype == "auto" and on_cpu and directory is not None:
        return torch.float32 if read_config(directory).dtype == torch.float16 else dtype
    return dtype


def _find_step_tokens(
    model: PagedModel, max_num_seqs: int, max_num_batched_tokens: int | None
) -> int:
    """Return the most tokens of a step, ``max_num_batched_tokens`` if given.

    Raises:
        RequestError: The model does not run exactly with so many.
    """
    if max_num_batched_tokens is None:
        usual = max(8192 if model.device.type == "cuda" else 2048, max_num_seqs)
        max_num_batched_tokens = min(usual, model.max_step_tokens or usual)
    most = max(max_num_seqs, max_num_batched_tokens)
    if model.max_step_tokens is not None and most > model.max_step_tokens:
        raise RequestError(
            f"max_num_seqs={max_num_seqs} and max_num_batched_tokens={max_num_batched_tokens}: "
            f"{model.name} runs exactly with at most {model.max_step_tokens} tokens a step, set "
            "both to that"
        )
    return max_num_batched_tokens


def _find_tokenizer(tokenizer: Any, model: str | os.PathLike[str] | None) -> Any:
    """Return the tokenizer given by the caller, or that of the checkpoint ``model``."""
    from transformers import PreTrainedTokenizerBase

    from ..models import load_tokenizer

    if tokenizer is None:
        return None if model is None else load_tokenizer(model)
    if isinstance(tokenizer, PreTrainedTokenizerBase):
        return tokenizer
    if not isinstance(tokenizer, (str, os.PathLike)) or not os.path.isdir(tokenizer):
        raise RequestError(
            f"tokenizer={tokenizer!r}: expected a directory with a tokenizer, or a tokenizer of "
            "Transformers'; nothing is downloaded"
        )
    found = load_tokenizer(tokenizer)
    if found is None:
        raise RequestError(
            f"tokenizer={tokenizer!r}: the directory has no tokenizer, expected tokenizer.json or "
            "another of its files"
        )
    return found


def _size(name: str, size: object, *, least: int = 1, most: int | None = None) -> int:
    allowed = f"of at least {least:,}" if most is None else f"from {least} to {most:,}"
    return integer(name, size, f"a whole number {allowed}", least, most)


def _size_if_given(name: str, size: object, *, least: int = 1, most: int | None = None) -> Any:
    return None if size is None else _size(name, size, least=least, most=most)


def _cache_dtype(name: torch.dtype | str) -> torch.dtype | None:
    """Return the element type that a user names; ``None`` for ``"auto"``, that of the weights.

    Raises:
        RequestError: A cache cannot have this type.
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


def _make_cache(
    model: PagedModel,
    dtype: torch.dtype,
    *,
    block_size: int,
    num_blocks: int | None,
    memory_fraction: float,
    max_num_seqs: int,
    max_model_len: int | None,
) -> KVCache:
    """Return a model's cache; see ``LLM`` for the arguments.

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
        model.layers, BlockPool(num_blocks, block_size), dtype=dtype, device=model.device
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
