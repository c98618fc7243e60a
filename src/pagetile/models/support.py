"""Refuses models by their config alone, and finds the number of positions that a model has.

These checks run before any weight is read. A model that passes them is run once with a recording
attention function (``probe``), and its logits are compared with its own (``proof``).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..errors import PagetileError, RequestError, UnsupportedError
from .module_attention import MODEL_TYPES

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_ATTENDS = {"full_attention", "sliding_attention", "chunked_attention"}
_KEEPS_STATE = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}
_FEWEST = 3
"""Number of positions that the proof needs: a first chunk, a later chunk and a decode."""


def check_class(model: Any) -> None:
    """Raise RequestError unless this is a Transformers model."""
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise RequestError(
            f"model is a {type(model).__name__}, expected a directory or a Transformers model"
        )


def check_config(
    config: PreTrainedConfig, model_class: type | None = None, max_model_len: int | None = None
) -> None:
    """Raise UnsupportedError if a model's config alone shows that it cannot run.

    Args:
        config: The whole model's config.
        model_class: The model's class; looked up by the config if not given.
        max_model_len: The number of positions that will be used; ``None`` for all.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    if model_class is None and type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    reason = _refuse(config, model_class, max_model_len)
    if reason is not None:
        raise UnsupportedError(
            f"model type {config.model_type!r} cannot run on a paged cache: {reason}"
        )


def _refuse(
    config: PreTrainedConfig, model_class: type | None, max_model_len: int | None
) -> str | None:
    text = config.get_text_config(decoder=True)
    if config.is_encoder_decoder:
        return "it is an encoder-decoder, and only decoders run"
    if _is_encoder(config) or getattr(text, "is_causal", True) is False:
        return "it is an encoder: each of its tokens sees those after it"
    if getattr(text, "use_bidirectional_attention", None) in (True, "all"):
        return "its attention is bidirectional: each of its tokens sees those after it"
    if model_class is None:
        return "it is not a causal language model"
    kinds = set(getattr(text, "layer_types", None) or ())
    if getattr(model_class, "_is_stateful", False) or kinds & _KEEPS_STATE:
        return "it keeps a recurrent or convolution state, and only keys and values have a cache"
    if not kinds <= _ATTENDS:
        return f"it has layers of a kind that does not run: {', '.join(sorted(kinds - _ATTENDS))}"
    chunk = getattr(text, "attention_chunk_size", None)
    if "chunked_attention" in kinds and chunk and (max_model_len is None or max_model_len > chunk):
        return f"its attention is chunked: set max_model_len to at most {chunk}, one chunk"
    floor = find_floor(text)
    if floor is not None and (max_model_len is None or max_model_len >= floor):
        return (
            f"from position {floor} on its queries are scaled, by their place in a step and not "
            f"in their sequence: set max_model_len to at most {floor - 1}"
        )
    calls_interface = getattr(model_class, "_can_set_attn_implementation", lambda: True)()
    if not calls_interface and config.model_type not in MODEL_TYPES:
        return "its layers do not call Transformers' attention interface"
    return None


def find_floor(text: PreTrainedConfig) -> int | None:
    """Return the position from which Llama 4 scales queries; ``None`` for other models.

    Llama 4 counts positions of the forward's row of tokens, not of a sequence.
    """
    is_tuned = getattr(text, "attn_temperature_tuning", False)
    return getattr(text, "floor_scale", None) if is_tuned else None


def _is_encoder(config: PreTrainedConfig) -> bool:
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING

    # GPT-NeoX is a decoder with is_decoder=False, but it has no masked language model class.
    is_decoder = getattr(config, "is_decoder", None)
    return is_decoder is False and type(config) in MODEL_FOR_MASKED_LM_MAPPING


def find_limit(config: PreTrainedConfig, max_model_len: int | None) -> int | None:
    """Return the number of positions at which a model is exact; ``None`` if no limit is known.

    Args:
        config: The whole model's config.
        max_model_len: The number of positions wanted; ``None`` for all.

    Raises:
        RequestError: ``max_model_len`` is more than the model has positions for.
        UnsupportedError: In a packed batch the model is not exact at that many positions.
    """
    text = config.get_text_config(decoder=True)
    limit = getattr(text, "max_position_embeddings", getattr(text, "max_seq_len", None))
    limit = limit if isinstance(limit, int) and limit > 0 else None
    switch = _find_rope_switch(text)
    known = min((n for n in (limit, switch, max_model_len) if n is not None), default=None)
    if known is not None and known < _FEWEST:
        raise RequestError(f"max_model_len is {known}, expected at least {_FEWEST}")
    if max_model_len is not None and limit is not None and max_model_len > limit:
        raise RequestError(
            f"max_model_len is {max_model_len}, but this model has {limit} positions "
            f"(max_position_embeddings): set it to at most {limit}"
        )
    if max_model_len is not None and switch is not None and max_model_len > switch:
        raise UnsupportedError(
            f"max_model_len is {max_model_len}, but once a sequence passes position {switch} this "
            "model's rotary embedding changes its frequencies for all sequences of a batch: set "
            f"it to at most {switch}"
        )
    return known


def _find_rope_switch(text: PreTrainedConfig) -> int | None:
    """Return the length from which rotary frequencies depend on a batch's longest sequence."""
    parameters: Any = getattr(text, "rope_parameters", None) or {}
    longest = getattr(text, "max_position_embeddings", None)
    switches = []
    for rope in (parameters, *parameters.values()):  # of all layers, or by kind of layer
        kind = rope.get("rope_type") if isinstance(rope, dict) else None
        if kind == "longrope":
            switches.append(rope.get("original_max_position_embeddings"))
        elif kind and "dynamic" in kind:
            switches.append(longest)
    return min((n for n in switches if n), default=None)


@contextmanager
def refusing(model: nn.Module) -> Iterator[None]:
    """Turn errors of a model's first forward into UnsupportedError, with the model's name."""
    name = type(model).__name__
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except PagetileError as error:
        raise UnsupportedError(f"{name} cannot run on a paged cache: {error}") from error
    except (
        ArithmeticError,
        AssertionError,
        AttributeError,
        LookupError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        raise UnsupportedError(
            f"{name} cannot run on a paged cache: {_find_part(model, error)} "
            f"({type(error).__name__}: {error})"
        ) from error


def _find_part(model: nn.Module, error: Exception) -> str:
    """Return which part of a model failed: the innermost module of an error's traceback."""
    names = {module: name for name, module in model.named_modules()}
    found = None
    traceback = error.__traceback__
    while traceback is not None:
        module = traceback.tb_frame.f_locals.get("self")
        if isinstance(module, nn.Module) and module in names:
            found = module
        traceback = traceback.tb_next
    if found is None:
        return "its layers could not be read, which is a fault of pagetile, please report it"
    part = f"its {names[found]} ({type(found).__name__})" if names[found] else "its forward"
    return f"{part} failed when it was given token ids and positions, but no mask and no cache"
