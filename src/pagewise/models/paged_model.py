"""A Transformers causal language model whose attention layers read and write our paged cache."""

from __future__ import annotations

import inspect
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import ShapeError, UnsupportedError
from ..kv_cache.storage import KVCache, LayerSpec
from .attention import NAME, AttentionLayer, collect_configs, driven
from .forward_batch import ForwardBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["ForwardBatch", "PagedModel"]


class PagedModel:
    """A Transformers model, driven step by step over a cache that is bound to it.

    ``load_model`` makes one and proves it. The Transformers model inside is not changed: its
    attention is ours for the length of a ``forward``, so its own ``generate`` still works between
    two of them, though not during one, from another thread.

    Attributes:
        name: The model's class, for messages.
        layers: The cache layers that it needs. One that shares another's keys owns none.
        vocab_size: Width of the logits.
        max_model_len: The most positions that it can take; ``None`` if no limit is known.
        eos_token_ids: Tokens that end a sequence, from its generation config or its config.
        dtype: Type of its weights.
        device: Where they are.
        config: The config of its text part.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        modules: Sequence[AttentionLayer],
        layers: tuple[LayerSpec, ...],
        *,
        vocab_size: int,
        max_model_len: int | None,
    ) -> None:
        self.name = type(model).__name__
        self.config = model.config.get_text_config(decoder=True)
        self.layers, self.vocab_size, self.max_model_len = layers, vocab_size, max_model_len
        self.eos_token_ids = _find_eos(model)
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        self._model = model
        self._configs = collect_configs(model)
        self._modules = modules
        self._slots = [(layer.module, layer) for layer in modules]
        self._options, self._takes_rows = _read_signature(model)

    def bind(self, cache: KVCache | None) -> None:
        """Use this cache from now on; ``None`` lets go of the one in use.

        Raises:
            ShapeError: The cache was made for other layers.
        """
        if cache is not None and [_size(spec) for spec in cache.layers] != [
            _size(spec) for spec in self.layers
        ]:
            raise ShapeError(
                f"the cache has {len(cache.layers)} layers that differ from the {len(self.layers)} "
                f"of {self.name}: make it with KVCache(model.layers, ...)"
            )
        for layer in self._modules:
            layer.bind(cache)

    def forward(self, step: ForwardBatch) -> Tensor:
        """Run the new tokens through the model; their keys and values go to the cache.

        Args:
            step: The tokens and where they belong. Positions below ``max_model_len`` and slots
                inside the cache are the caller's to see to.

        Returns:
            ``[n, vocab_size]``, the logits of ``step.logits_rows``, in the type the model gives.

        Raises:
            UnsupportedError: No cache is bound, or the model asks its attention for something
                that it did not ask for when it was loaded.
        """
        options = dict(self._options)
        if self._takes_rows:
            options["logits_to_keep"] = step.logits_rows
        for layer in self._modules:
            layer.step = step
        try:
            with torch.no_grad(), driven(self._configs, NAME, self._slots):
                output = self._model(
                    input_ids=step.token_ids[None], position_ids=step.positions[None], **options
                )
        finally:
            for layer in self._modules:
                layer.step = None
        logits: Tensor = output.logits[0]
        return logits if self._takes_rows else logits[step.logits_rows]


def _size(spec: LayerSpec) -> tuple[int, int, int]:
    return spec.num_kv_heads, spec.head_size, spec.v_head_size


def _read_signature(model: PreTrainedModel) -> tuple[dict[str, Any], bool]:
    """The options of every forward, and whether it can leave out logits that nobody wants."""
    parameters = inspect.signature(model.forward).parameters
    options = {"attention_mask": None, "past_key_values": None, "use_cache": False, "return_dict": True}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    known = {name: value for name, value in options.items() if takes_any or name in parameters}
    return known, "logits_to_keep" in parameters


def _find_eos(model: PreTrainedModel) -> tuple[int, ...]:
    text_config = model.config.get_text_config(decoder=True)
    for source in (getattr(model, "generation_config", None), model.config, text_config):
        found = getattr(source, "eos_token_id", None)
        if found is not None:
            return (found,) if isinstance(found, int) else tuple(found)
    return ()
