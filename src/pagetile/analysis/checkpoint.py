"""Reads a checkpoint's ``config.json`` and the headers of its weight files, for memory plans."""

from __future__ import annotations

import json
import math
import os
import struct
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import RequestError
from .memory import LayerKind

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

ELEMENT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}

_FLOATS = {"F64", "F32", "F16", "BF16"}  # as safetensors calls what a model is cast from
_NAMES = {"sliding_attention": "sliding window", "chunked_attention": "chunked attention"}


@dataclass(frozen=True)
class Checkpoint:
    """Properties of a model that a memory plan needs."""

    model_type: str
    layers: tuple[LayerKind, ...]
    dtype: str
    """Element type of weights and cache."""
    max_model_len: int | None
    """The most positions of a sequence; ``None`` if the model knows no limit."""
    weight_bytes: int | None
    """``None`` where there are no safetensors files."""


def read_checkpoint(
    directory: Path, *, dtype: str = "auto", max_model_len: int | None = None
) -> Checkpoint:
    """Read a directory without loading a weight.

    Args:
        directory: Has at least a ``config.json``.
        dtype: ``"auto"`` is the checkpoint's own.
        max_model_len: The most positions wanted.

    Raises:
        RequestError: The directory has no readable config or weight files, or the model has
            fewer positions than ``max_model_len``.
        UnsupportedError: Its config says that the engine cannot run it.
    """
    from ..models.loading import read_config
    from ..models.support import check_config, find_limit

    config = read_config(directory)
    check_config(config, max_model_len=max_model_len)
    if dtype == "auto":
        text = config.get_text_config(decoder=True)
        known = config.dtype or text.dtype
        dtype = "float32" if known is None else str(known).removeprefix("torch.")
    if dtype not in ELEMENT_BYTES:
        raise RequestError(f"dtype {dtype!r}: expected {', '.join(ELEMENT_BYTES)}")
    return Checkpoint(
        config.model_type,
        layer_kinds(config),
        dtype,
        find_limit(config, max_model_len),
        weight_bytes(directory, ELEMENT_BYTES[dtype]),
    )


def layer_kinds(config: PreTrainedConfig) -> tuple[LayerKind, ...]:
    """Return a model's attention layers, grouped by what they cache for a token."""
    text = config.get_text_config(decoder=True)
    num_layers = text.num_hidden_layers
    num_owners = num_layers - (getattr(text, "num_kv_shared_layers", None) or 0)
    kinds = Counter(
        _layer_kind(text, position, is_shared=position >= num_owners)
        for position in range(num_layers)
    )
    return tuple(replace(kind, num_layers=count) for kind, count in kinds.items())


def _layer_kind(text: PreTrainedConfig, position: int, *, is_shared: bool) -> LayerKind:
    layer: Any = text.per_layer_config[position]
    types = getattr(text, "layer_types", None)
    window = getattr(layer, "sliding_window", None)
    if types is None:
        kind = "full_attention" if window is None else "sliding_attention"
    else:
        kind = types[position]
    num_heads = layer.num_attention_heads
    head_size = getattr(layer, "head_dim", None) or text.hidden_size // num_heads
    # Where the config's class does not know the word, the model does not read it.
    is_grouped = hasattr(type(layer), "num_key_value_heads")
    num_kv_heads = (layer.num_key_value_heads if is_grouped else None) or num_heads
    v_head_size = head_size
    if getattr(layer, "kv_lora_rank", None):
        # Latent attention, which the engine runs expanded to full keys and values.
        num_kv_heads = num_heads
        head_size, v_head_size = layer.qk_nope_head_dim + layer.qk_rope_head_dim, layer.v_head_dim
    return LayerKind(
        _NAMES.get(kind, "full attention"),
        1,
        num_heads,
        num_kv_heads,
        head_size,
        v_head_size,
        window if kind == "sliding_attention" else None,
        is_shared,
    )


def weight_bytes(directory: Path, element_bytes: int) -> int | None:
    """Return the bytes of the loaded weights, from the headers of the safetensors files.

    Args:
        directory: The checkpoint's directory.
        element_bytes: Size of floating-point weights once loaded; others are unchanged.

    Returns:
        ``None`` where there are no such files.

    Raises:
        RequestError: A file is missing or broken.
    """
    from ..models.loading import weight_files

    total = 0
    files = weight_files(directory)
    for file in files:
        for name, tensor in _read_head(file).items():
            if name == "__metadata__":
                continue
            if tensor["dtype"] in _FLOATS:
                total += math.prod(tensor["shape"]) * element_bytes
            else:
                start, end = tensor["data_offsets"]
                total += end - start
    return total if files else None


def _read_head(file: Path) -> dict[str, Any]:
    """Return the header of a safetensors file: its length, then JSON."""
    try:
        with file.open("rb") as stream:
            (size,) = struct.unpack("<Q", stream.read(8))
            if size > os.fstat(stream.fileno()).st_size:
                raise ValueError
            head: dict[str, Any] = json.loads(stream.read(size))
        if not isinstance(head, dict):
            raise TypeError
        return head
    except FileNotFoundError:
        raise RequestError(f"{file} is missing: the directory's index names it") from None
    except (ValueError, TypeError, struct.error):
        raise RequestError(f"{file} is not a safetensors file, or cut short") from None
