"""Which models run: refused with a reason, or proven exact when they are loaded.

Cheap reasons come first, from the config alone, before any weight is read. Then the model shows
what its layers are (``probe``), and last its logits are compared with its own (``proof``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import PagewiseError, RequestError, UnsupportedError
from .attention import SLOT, collect_configs, driven, register
from .paged_model import PagedModel
from .probe import PROBE, AttentionCall, describe_layers, register_probe
from .proof import TOLERANCES, make_sequences, prove

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

__all__ = ["check_config", "find_limit", "make_paged"]

_ATTENDS = {"full_attention", "sliding_attention", "chunked_attention"}


def check_config(
    config: PreTrainedConfig, model_class: type | None = None, max_model_len: int | None = None
) -> None:
    """Raise UnsupportedError if a model's config alone says that it cannot run.

    Args:
        config: The whole model's config.
        model_class: The model's class; looked up by the config if not given.
        max_model_len: The most positions that will be asked for.
    """
    reason = _refuse(config, model_class, max_model_len)
    if reason is not None:
        raise UnsupportedError(f"model type {config.model_type!r} cannot run on a paged cache: {reason}")


def _refuse(
    config: PreTrainedConfig, model_class: type | None, max_model_len: int | None
) -> str | None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    text = config.get_text_config(decoder=True)
    if config.is_encoder_decoder:
        return "it is an encoder-decoder, and only decoders run"
    if getattr(text, "is_decoder", True) is False:
        return "it is an encoder (is_decoder=False): each token sees those after it"
    if getattr(text, "is_causal", True) is False or getattr(
        text, "use_bidirectional_attention", None
    ) in (True, "all"):
        return "its attention is bidirectional: each token sees those after it"
    if model_class is None:
        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            return "it is not a causal language model"
        model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    kinds = set(getattr(text, "layer_types", None) or ())
    if getattr(model_class, "_is_stateful", False) or kinds & {"linear_attention", "conv", "hybrid"}:
        return "it keeps a recurrent or convolution state, and only keys and values have a cache"
    if not kinds <= _ATTENDS:
        return f"its layers are of kinds that do not run: {', '.join(sorted(kinds - _ATTENDS))}"
    chunk = getattr(text, "attention_chunk_size", None)
    if "chunked_attention" in kinds and chunk and (max_model_len is None or max_model_len > chunk):
        return f"its attention is chunked: set max_model_len to at most {chunk}, one chunk"
    if not getattr(model_class, "_can_set_attn_implementation", lambda: True)():
        return "its layers do not call Transformers' attention interface"
    return None


def find_limit(config: PreTrainedConfig, max_model_len: int | None) -> int | None:
    """The most positions that a model takes and gets right, or ``None`` if none is known.

    Raises:
        RequestError: ``max_model_len`` is more than the model has positions for.
        UnsupportedError: It is more than the model gets right in a packed batch.
    """
    text = config.get_text_config(decoder=True)
    limit = getattr(text, "max_position_embeddings", None)
    limit = limit if isinstance(limit, int) and limit > 0 else None
    if max_model_len is not None and max_model_len < 3:
        raise RequestError(f"max_model_len is {max_model_len}, expected at least 3")
    if max_model_len is not None and limit is not None and max_model_len > limit:
        raise RequestError(
            f"max_model_len is {max_model_len}, but model type {config.model_type!r} has only "
            f"{limit} positions (max_position_embeddings)"
        )
    switch = _find_rope_switch(text)
    if switch is not None and max_model_len is not None and max_model_len > switch:
        raise UnsupportedError(
            f"max_model_len is {max_model_len}, but past position {switch} this model's rotary "
            "embedding changes its frequencies for every sequence of the batch: set it to at "
            f"most {switch}"
        )
    known = [n for n in (limit, switch, max_model_len) if n is not None]
    return min(known, default=None)


def _find_rope_switch(text: PreTrainedConfig) -> int | None:
    """Where frequencies begin to depend on the longest sequence of the batch, if they do."""
    parameters: Any = getattr(text, "rope_parameters", None) or {}
    kinds = [p for p in (parameters, *parameters.values()) if isinstance(p, dict)]
    longest = getattr(text, "max_position_embeddings", None)
    switches = [
        # "dynamic" starts from the longest length it knows, "longrope" from the first.
        longest if "dynamic" in kind["rope_type"] else kind.get("original_max_position_embeddings")
        for kind in kinds
        if "dynamic" in kind.get("rope_type", "") or kind.get("rope_type") == "longrope"
    ]
    return min((s for s in switches if s), default=None)


def make_paged(model: PreTrainedModel, max_model_len: int | None) -> PagedModel:
    """Drive a model through our attention, and prove that its logits stay its own.

    Args:
        model: In evaluation mode, its config checked.
        max_model_len: The most positions wanted; ``None`` for all that it can take.

    Raises:
        RequestError: It has fewer positions than that.
        UnsupportedError: It would not be exact; the message says which check failed.
    """
    name = type(model).__name__
    limit = find_limit(model.config, max_model_len)
    if model.dtype not in TOLERANCES:
        raise UnsupportedError(f"{name} is {model.dtype}: load it as float32, float16 or bfloat16")
    register()
    register_probe()
    try:
        return _make_proven(model, limit)
    except (UnsupportedError, torch.OutOfMemoryError):
        raise
    except PagewiseError as error:
        raise UnsupportedError(f"{name} cannot run on a paged cache: {error}") from error
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise UnsupportedError(
            f"{name} cannot be driven step by step: its forward failed with "
            f"{type(error).__name__}: {error}"
        ) from error


@torch.no_grad()
def _make_proven(model: PreTrainedModel, limit: int | None) -> PagedModel:
    text = model.config.get_text_config(decoder=True)
    vocab_size = model.get_input_embeddings().num_embeddings
    sequences = make_sequences(vocab_size, limit)
    sequences = (sequences[0].to(model.device), sequences[1].to(model.device))
    expected = tuple(_run_eager(model, sequence) for sequence in sequences)
    calls = _record_calls(model, sequences[0])
    try:
        modules, layers = describe_layers(model, calls, text.num_hidden_layers, limit)
    except UnsupportedError as error:
        raise UnsupportedError(f"{type(model).__name__} cannot run on a paged cache: {error}") from None
    paged = PagedModel(
        model, modules, layers, vocab_size=expected[0].shape[-1], max_model_len=limit
    )
    prove(paged, sequences, (expected[0], expected[1]))
    paged.bind(None)
    return paged


def _run_eager(model: PreTrainedModel, token_ids: Tensor) -> Tensor:
    """Logits ``[length, vocab_size]`` of a whole sequence from the model's own attention."""
    with driven(collect_configs(model), "eager"):
        logits: Tensor = _run(model, token_ids).logits[0]
    return logits


def _record_calls(model: PreTrainedModel, token_ids: Tensor) -> list[AttentionCall]:
    calls: list[AttentionCall] = []
    slots = [(module, calls) for module in model.modules()]
    with driven(collect_configs(model), PROBE, slots):
        _run(model, token_ids)
    return calls


def _run(model: PreTrainedModel, token_ids: Tensor) -> Any:
    positions = torch.arange(len(token_ids), device=token_ids.device)
    return model(input_ids=token_ids[None], position_ids=positions[None], use_cache=False)
