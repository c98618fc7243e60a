"""A Transformers causal language model whose attention layers use a paged KV cache."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import RequestError, ShapeError, UnsupportedError
from ..kv_cache.storage import KVCache, LayerSpec
from .attention import NAME, SLOT, AttentionLayer, collect_configs, driven, register
from .experts import find_experts
from .forward_batch import ForwardBatch
from .fused import Replacement, find_impl, find_replacements
from .fusion import Fusion, fuse
from .linears import find_linears
from .loading import explained, read_model
from .module_attention import find_adapters
from .probe import describe_layers, record_calls, register_probe
from .proof import make_sequences, prove
from .support import check_class, check_config, find_floor, find_limit, refusing

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


class PagedModel:
    """A Transformers model that runs step by step over a cache that is bound to it.

    ``load_model`` makes one and checks it. The Transformers model inside is not changed: its
    attention, norms and decoder layers are replaced for the length of a ``forward``, and weights of
    products with one input become views of one tensor. Its own ``generate`` works between two
    forwards, but not from another thread during one.

    Attributes:
        name: The model's class, for messages.
        layers: The cache layers that it needs. An attention layer that shares another's keys has
            none.
        vocab_size: Width of the logits.
        max_model_len: The most positions that it supports; ``None`` if no limit is known.
        max_step_tokens: The most tokens that one ``forward`` can take; ``None``: any number.
        eos_token_ids: Tokens that end a sequence, from its generation config or its config.
        dtype: Type of its weights.
        device: Device of its weights.
        config: The config of its text part.
        fused_layers: For each decoder layer by name, why it runs Transformers' code; ``None``: it
            runs fused kernels.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        modules: Sequence[AttentionLayer],
        layers: tuple[LayerSpec, ...],
        *,
        vocab_size: int,
        max_model_len: int | None,
        replacements: Sequence[Replacement] = (),
    ) -> None:
        self.name = type(model).__name__
        self.config = model.config.get_text_config(decoder=True)
        self.layers, self.vocab_size, self.max_model_len = layers, vocab_size, max_model_len
        floor = find_floor(self.config)
        self.max_step_tokens = None if floor is None else floor - 1
        self.eos_token_ids = _find_eos(model)
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        self._model = model
        self._configs = collect_configs(model)
        self._modules = modules
        self._attributes = [*((layer.module, SLOT, layer) for layer in modules), *replacements]
        self._options, self._takes_rows = _read_signature(model)
        self.fused_layers: dict[str, str | None] = {}
        self._is_bound = False

    def bind(self, cache: KVCache | None) -> None:
        """Use this cache from now on; ``None`` releases the current one.

        Raises:
            ShapeError: The cache was made for other layers.
        """
        if cache is not None and list(map(_sizes, cache.layers)) != list(map(_sizes, self.layers)):
            raise ShapeError(
                f"the cache has {len(cache.layers)} layers, and not those that {self.name} needs: "
                "make it with KVCache(model.layers, pool)"
            )
        for layer in self._modules:
            layer.bind(cache)
        self._is_bound = cache is not None

    def forward(self, step: ForwardBatch) -> Tensor:
        """Run new tokens through the model; their keys and values go to the bound cache.

        Args:
            step: The tokens, positions and slots. The caller keeps positions below
                ``max_model_len``.

        Returns:
            ``[n, vocab_size]``, the logits of ``step.logits_rows``, in the model's own type.

        Raises:
            UnsupportedError: No cache is bound, or the model calls its attention with options that
                it did not use when it was loaded.
        """
        if not self._is_bound:
            raise UnsupportedError(
                f"{self.name} has no cache: call bind(KVCache(model.layers, pool))"
            )
        if self._takes_rows:
            options = {**self._options, "logits_to_keep": step.logits_rows}
        else:
            options = self._options
        for layer in self._modules:
            layer.step = step
        try:
            with (
                torch.no_grad(),
                evaluating(self._model, self.device),
                driven(self._configs, NAME, self._attributes),
            ):
                output = self._model(
                    input_ids=step.token_ids[None], position_ids=step.positions[None], **options
                )
        finally:
            for layer in self._modules:
                layer.step = None
        logits: Tensor = output.logits[0]
        return logits if self._takes_rows else logits[step.logits_rows]


def load_model(
    model: str | os.PathLike[str] | PreTrainedModel,
    *,
    dtype: torch.dtype | str = "auto",
    device: torch.device | str | None = None,
    max_model_len: int | None = None,
) -> PagedModel:
    """Make a Transformers model run on a paged cache, and check that its logits stay the same.

    The check runs a few tokens through the model, by its own code and from pages: seconds for a
    large model, milliseconds for a small one.

    Args:
        model: A directory with ``config.json`` and safetensors weights (nothing is downloaded, no
            code from it is run), or a model, which is moved to ``device``, not copied. A model in
            training mode runs in evaluation mode here, and keeps its mode otherwise.
        dtype: Type of the weights: ``"auto"`` (the checkpoint's), a name, or a torch type.
        device: The device. ``None``: the CPU for a directory, a model's own for a model.
        max_model_len: The most positions that will be used; ``None``: all that it supports.

    Raises:
        RequestError: The directory holds no model that can be read, a model is given that does
            not have ``dtype``, or it has fewer than ``max_model_len`` positions.
        UnsupportedError: The logits differ or the model is not supported; the message says why.

    Examples:
        >>> from pagetile.demo import path
        >>> model = load_model(path())
        >>> model.layers[0]
        LayerSpec(num_kv_heads=2, head_size=32, v_head_size=32, sliding_window=None)
    """

    def check(config: PreTrainedConfig, model_class: type | None = None) -> None:
        check_config(config, model_class, max_model_len)
        find_limit(config, max_model_len)

    with torch.device("cpu"):  # whatever the caller's default device is
        if isinstance(model, (str, os.PathLike)):
            source = read_model(model, dtype, check)
        else:
            check_class(model)
            check(model.config, type(model))
            _check_dtype(model, dtype)
            source = model
        if device is not None:
            with explained(f"device {str(device)!r} cannot be used"):
                source.to(device)
        if not source.training:
            source.eval()  # all of it
        with evaluating(source, source.device):
            return _make_proven(source, find_limit(source.config, max_model_len))


@contextmanager
def evaluating(model: PreTrainedModel, device: torch.device) -> Iterator[None]:
    """Context in which a model is in evaluation mode, without autocast.

    Each module's mode is restored. Under autocast its keys would not have the cache's type.
    """
    if device.type != "meta" and torch.is_autocast_enabled(device.type):
        with torch.autocast(device.type, enabled=False), evaluating(model, device):
            yield
        return
    if not model.training:
        yield
        return
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _check_dtype(model: PreTrainedModel, dtype: torch.dtype | str) -> None:
    if dtype != "auto" and str(dtype).removeprefix("torch.") != str(model.dtype).removeprefix(
        "torch."
    ):
        # model.to(dtype) would round rotary frequencies, which must stay float32.
        raise RequestError(
            f"the model is {model.dtype} but dtype={dtype} is asked for: load it with that dtype"
        )


def _make_proven(model: PreTrainedModel, limit: int | None) -> PagedModel:
    register()
    register_probe()
    with refusing(model):
        sequences = make_sequences(model, limit)
        adapters = find_adapters(model, limit)
        calls, vocab_size = record_calls(model, sequences[0], adapters)
        modules, layers = describe_layers(model, calls, limit)
        attention = [layer.module for layer in modules]
        impl = find_impl(model.device, model.dtype)
        fusion, experts = Fusion(), []
        if impl == "cpu":
            found = find_replacements(model, [], impl) + find_linears(model)
            fusion = fuse(model, modules, limit, found, impl)
        elif impl is not None:
            fusion = fuse(model, modules, limit, find_replacements(model, attention, impl), impl)
            experts = find_experts(model, impl)
        paged = PagedModel(
            model,
            modules,
            layers,
            vocab_size=vocab_size,
            max_model_len=limit,
            replacements=[*adapters, *fusion.replacements, *experts],
        )
        paged.fused_layers = fusion.reasons
        prove(paged, model, attention, sequences)
    return paged


def _sizes(spec: LayerSpec) -> tuple[int, int, int]:
    return spec.num_kv_heads, spec.head_size, spec.v_head_size


def _read_signature(model: PreTrainedModel) -> tuple[dict[str, Any], bool]:
    """Return the options of every forward, and whether it can compute only some logits."""
    parameters = inspect.signature(model.forward).parameters
    options = {
        "attention_mask": None,
        "past_key_values": None,
        "use_cache": False,
        "return_dict": True,
    }
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
