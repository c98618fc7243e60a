"""Find a model's attention layers by running it once with an attention function that records.

The probe computes nothing: it records the module and the arguments of each call. A mask function
is registered with it, unlike with the attention function that serves, so the model builds a mask
for each layer. The rule of that mask is compared with what paged attention will show, at positions
far beyond the probe's few tokens. This finds a window or chunk of 8192 that no short forward
reaches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..errors import UnsupportedError
from ..kv_cache.storage import LayerSpec
from .attention import SLOT, AttentionLayer, collect_configs, driven, refuse_options
from .fused import Replacement

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PROBE = "pagetile_probe"

_FURTHEST = 1 << 20
"""Masks are compared up to this position if the model has no limit."""


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """One call of the attention function."""

    module: nn.Module
    query: Tensor
    """``[1, num_heads, num_tokens, head_size]``; ``key`` and ``value`` have KV heads."""
    key: Tensor
    value: Tensor
    mask: Tensor | None
    options: dict[str, Any]
    output: Tensor
    """The result returned to it: ``[1, num_tokens, num_heads, v_head_size]``."""

    @property
    def sliding_window(self) -> int | None:
        """Number of visible keys, the query's own included, as Transformers counts them."""
        return self.options.get("sliding_window")


def register_probe() -> None:
    """Register the probe with Transformers; a second call changes nothing."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(PROBE, recorder(lambda shape, like: like.new_zeros(shape)))
    AttentionMaskInterface.register(PROBE, _make_mask)


def recorder(answer: Callable[[tuple[int, ...], Tensor], Tensor]) -> Callable[..., Any]:
    """Return an attention function that only records its calls in an attribute of the module.

    Args:
        answer: Returns a call's result from its shape and the query.
    """

    def note(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        output = answer((1, query.shape[2], query.shape[1], value.shape[3]), query)
        call = AttentionCall(module, query, key, value, attention_mask, options, output)
        module.__dict__[SLOT].append(call)
        return output, None

    return note


def _make_mask(**arguments: Any) -> Tensor:
    """Return the mask of an eager forward, with its rule as the attribute ``is_visible``."""
    from transformers.masking_utils import eager_mask

    # Transformers leaves out a mask that hides nothing; it must be detected, too.
    mask: Tensor = eager_mask(**{**arguments, "allow_is_bidirectional_skip": False})
    mask.is_visible = arguments["mask_function"]  # type: ignore[attr-defined]
    return mask


@torch.no_grad()
def record_calls(
    model: PreTrainedModel, token_ids: Tensor, adapters: Sequence[Replacement] = ()
) -> tuple[list[AttentionCall], int]:
    """Run a model once; return every call of its attention function and its logits' width.

    Raises:
        UnsupportedError: The model gives no logits.
    """
    calls: list[AttentionCall] = []
    slots = [(module, SLOT, calls) for module in model.modules()]
    with driven(collect_configs(model), PROBE, [*slots, *adapters]):
        output = model(input_ids=token_ids[None], use_cache=False, return_dict=True)
    logits = getattr(output, "logits", None)
    if logits is None:
        raise UnsupportedError("it gives no logits: load it with its language model head")
    return calls, logits.shape[-1]


def describe_layers(
    model: PreTrainedModel, calls: list[AttentionCall], max_model_len: int | None
) -> tuple[tuple[AttentionLayer, ...], tuple[LayerSpec, ...]]:
    """Return the attention modules in the order of their calls, and their cache layers.

    Raises:
        UnsupportedError: A layer never calls, calls twice, or asks for something that paged
            attention does not compute; the message names the layer.
    """
    names = {module: name for name, module in model.named_modules()}
    _check_counts(calls, model.config.get_text_config(decoder=True).num_hidden_layers, names)
    layers: list[AttentionLayer] = []
    specs: list[LayerSpec] = []
    owners: list[AttentionCall] = []
    for call in calls:
        try:
            _check_call(call, max_model_len)
        except UnsupportedError as error:
            raise UnsupportedError(f"layer {names[call.module]!r}: {error}") from None
        index = _find_donor(call, owners)
        writes = index is None
        if index is None:
            index = len(owners)
            owners.append(call)
            _, num_kv_heads, _, head_size = call.key.shape
            v_head_size = call.value.shape[3]
            specs.append(LayerSpec(num_kv_heads, head_size, v_head_size, call.sliding_window))
        else:
            specs[index] = _widen(specs[index], call.sliding_window)
        layers.append(AttentionLayer(call.module, index, writes=writes))
    return tuple(layers), tuple(specs)


def _check_counts(calls: list[AttentionCall], num_layers: int, names: dict[nn.Module, str]) -> None:
    counts = Counter(call.module for call in calls)
    if not counts:
        raise UnsupportedError("none of its layers calls Transformers' attention interface")
    for module, count in counts.items():
        if count != 1:
            raise UnsupportedError(
                f"layer {names[module]!r} calls the attention function {count} times in a "
                "forward, expected once: a second call would overwrite the first one's keys"
            )
    if len(counts) < num_layers:
        raise UnsupportedError(
            f"only {len(counts)} of its {num_layers} layers call Transformers' attention interface"
        )


def _check_call(call: AttentionCall, max_model_len: int | None) -> None:
    options = dict(call.options)
    for known in ("scaling", "sliding_window", "softcap", "s_aux", "alibi_slopes"):
        options.pop(known, None)
    is_causal = options.pop("is_causal", None)
    if is_causal is None:
        is_causal = getattr(call.module, "is_causal", True)
    refuse_options(None, options.pop("dropout", 0.0), is_causal, options)
    if call.query.shape[0] != 1 or call.query.shape[2] != call.key.shape[2]:
        raise UnsupportedError(
            f"its queries {list(call.query.shape)} and keys {list(call.key.shape)} are not those "
            "of one row of tokens"
        )
    for name, size in (("head_size", call.key.shape[3]), ("v_head_size", call.value.shape[3])):
        if size % 8 or not 8 <= size <= 512:
            raise UnsupportedError(f"{name} is {size}, expected a multiple of 8 from 8 to 512")
    if call.mask is not None and hasattr(call.mask, "is_visible"):
        _check_mask(call.mask, call.sliding_window, max_model_len)


def _check_mask(mask: Tensor, window: int | None, max_model_len: int | None) -> None:
    """Raise UnsupportedError if the model's mask differs from the mask of paged attention."""
    limit = min(max_model_len or _FURTHEST, _FURTHEST)
    positions = _telling_positions(window, limit).to(mask.device)
    q, k = positions[:, None], positions[None, :]
    expected = (k <= q) if window is None else (k <= q) & (k > q - window)
    batch = head = torch.zeros((), dtype=torch.int64, device=mask.device)
    try:
        visible = mask.is_visible(batch, head, q, k)  # type: ignore[attr-defined]
    except IndexError:
        raise UnsupportedError(
            "what it may see depends on the tokens, not only on positions"
        ) from None
    wrong = (visible.broadcast_to(expected.shape) != expected).nonzero()
    if len(wrong):
        at, seen = positions[wrong[0]].tolist()
        verb = "hides" if expected[wrong[0, 0], wrong[0, 1]] else "shows"
        shown = "all earlier tokens" if window is None else f"the last {window} tokens"
        raise UnsupportedError(
            f"its own mask {verb} position {seen} to position {at}, but what it tells its "
            f"attention function is to attend to {shown}: chunked, bidirectional and prefix "
            "attention do not run"
        )


def _telling_positions(window: int | None, limit: int) -> Tensor:
    """Return positions at which any window or chunk below ``limit`` makes a difference."""
    marks = [*(1 << n for n in range(21)), limit - 1]
    edges = [0, -1] if window is None else [0, -1, -window - 1, -window, 1 - window, window]
    near = {*range(24), *(mark + edge for mark in marks for edge in edges)}
    return torch.tensor(sorted(p for p in near if 0 <= p < limit))


def _find_donor(call: AttentionCall, owners: list[AttentionCall]) -> int | None:
    """Return the index of the layer whose key and value tensors this call was given, if any."""
    for index, owner in enumerate(owners):
        if call.key is owner.key and call.value is owner.value:
            return index
    return None


def _widen(spec: LayerSpec, window: int | None) -> LayerSpec:
    """Keep keys for as long as the widest window of the layers that share them."""
    if window is None or spec.sliding_window is None:
        return replace(spec, sliding_window=None)
    return replace(spec, sliding_window=max(window, spec.sliding_window))
