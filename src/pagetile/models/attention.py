"""The attention function that Transformers calls, and the context in which a model calls it.

Transformers picks a model's attention function by the name in its configs. This function takes the
cache and the step from an ``AttentionLayer``, an attribute of the attention module, because some
models do not pass all arguments on. Names and layers are set for one forward only, so the model's
own ``generate`` still works::

    with driven(configs, NAME, layers):    config: "sdpa" -> "pagetile"
        model(...)                         module.pagetile_layer -> AttentionLayer
                                             write_kv(new keys and values)
                                             paged_attention(queries, all pages)

Some modules' ``forward`` is replaced in the same way (``fused``, ``linears``, ``fusion``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ..errors import UnsupportedError
from ..kv_cache.storage import KVCache
from ..ops.paged_attention import paged_attention
from ..ops.write_kv import write_kv
from .forward_batch import ForwardBatch

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

# Transformers treats names with "flash", "sdpa", "flex_attention" or a slash, or that start with
# "paged|", specially. No mask function has this name, so models build no mask.
NAME = "pagetile"

SLOT = "pagetile_layer"

_WITHOUT_EFFECT = frozenset(
    {
        "cache_position",
        "logits_to_keep",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)


class AttentionLayer:
    """State of an attention module: its layer of the cache, and the current step.

    Args:
        module: The attention module that is passed to the attention function.
        index: The layer of the cache that it reads.
        writes: Whether it writes that layer; one that shares another's keys only reads it.
    """

    __slots__ = (
        "index", "k_cache", "k_scale", "module", "step", "v_cache", "v_scale", "writes",
    )  # fmt: skip

    def __init__(self, module: nn.Module, index: int, *, writes: bool) -> None:
        self.module, self.index, self.writes = module, index, writes
        self.step: ForwardBatch | None = None
        self.bind(None)

    def bind(self, cache: KVCache | None) -> None:
        """Use this cache from now on; ``None``: none."""
        self.k_cache: Tensor | None = None if cache is None else cache.k[self.index]
        self.v_cache: Tensor | None = None if cache is None else cache.v[self.index]
        self.k_scale: Tensor | None = None if cache is None else cache.k_scale[self.index]
        self.v_scale: Tensor | None = None if cache is None else cache.v_scale[self.index]


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    alibi_slopes: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention with Transformers' signature; ``query`` ``[1, num_heads, num_tokens, head_size]``.

    Returns:
        ``[1, num_tokens, num_heads, v_head_size]``, contiguous, and no weights.

    Raises:
        UnsupportedError: An argument would change the result and is not supported, or the call
            comes from outside of a step.
    """
    layer: AttentionLayer | None = module.__dict__.get(SLOT)
    if layer is None or layer.step is None:
        raise UnsupportedError(
            f"{type(module).__name__} called the attention implementation {NAME!r} outside of "
            "PagedModel.forward: load the model with pagetile.models.load_model"
        )
    if (
        attention_mask is not None
        or dropout
        or is_causal is False
        or others.keys() - _WITHOUT_EFFECT
    ):
        refuse_options(attention_mask, dropout, is_causal, others)
    step, k_cache, v_cache = layer.step, layer.k_cache, layer.v_cache
    assert k_cache is not None
    assert v_cache is not None
    q = query.squeeze(0).transpose(0, 1)
    if q.shape[0] != step.slot_mapping.shape[0]:
        raise UnsupportedError(
            f"{type(module).__name__} passed {q.shape[0]} of {step.slot_mapping.shape[0]} tokens "
            "to its attention: only models that keep every token can be packed"
        )
    if layer.writes:
        k, v = key.squeeze(0).transpose(0, 1), value.squeeze(0).transpose(0, 1)
        write_kv(
            k, v, k_cache, v_cache, step.slot_mapping, k_scale=layer.k_scale, v_scale=layer.v_scale
        )
    out, _ = paged_attention(
        q,
        k_cache,
        v_cache,
        step.batch,
        softmax_scale=scaling,
        sliding_window=sliding_window,
        logits_soft_cap=softcap,
        alibi_slopes=alibi_slopes,
        sinks=s_aux,
        k_scale=layer.k_scale,
        v_scale=layer.v_scale,
    )
    return out.unsqueeze(0), None


def refuse_options(
    attention_mask: object, dropout: float, is_causal: bool | None, others: Mapping[str, object]
) -> None:
    """Raise UnsupportedError if one of these arguments would change the result."""
    if attention_mask is not None:
        raise UnsupportedError("the model passes an attention mask of its own making")
    if dropout:
        raise UnsupportedError(f"the model asks for dropout={dropout}: call model.eval() first")
    if is_causal is False:
        raise UnsupportedError("the model asks for bidirectional attention (is_causal=False)")
    unknown = [name for name in others.keys() - _WITHOUT_EFFECT if others[name] is not None]
    if unknown:
        listed = ", ".join(sorted(unknown))
        raise UnsupportedError(
            f"the model passes {listed} to its attention, which nothing here computes"
        )


def collect_configs(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """Return all configs of the model and its parts, each once."""
    from transformers import PreTrainedConfig

    waiting = [module.config for module in model.modules() if hasattr(module, "config")]
    found: dict[int, PreTrainedConfig] = {}
    while waiting:
        config = waiting.pop()
        if isinstance(config, PreTrainedConfig) and id(config) not in found:
            found[id(config)] = config
            waiting += [getattr(config, name, None) for name in config.sub_configs]
    return list(found.values())


@contextmanager
def driven(
    configs: Iterable[PreTrainedConfig],
    name: str,
    attributes: Sequence[tuple[nn.Module, str, object]] = (),
) -> Iterator[None]:
    """Make a model's configs name one attention function, and its modules have ``attributes``.

    An attribute that a module already has was set by other code, and stays. The configs' padding
    token is unset, too: 32 kinds of models would search the input for it, which waits for the
    device, only to warn.
    """
    # Written past the configs' own validation, which costs more than the rest of the switch.
    saved = []
    for config in configs:
        values = vars(config)
        saved.append(
            (values, values.get("_attn_implementation_internal"), values.get("pad_token_id"))
        )
        values["_attn_implementation_internal"] = name
        if saved[-1][2] is not None:
            values["pad_token_id"] = None
    try:
        for module, attribute, value in attributes:
            module.__dict__.setdefault(attribute, value)
        yield
    finally:
        for values, implementation, pad_token_id in saved:
            values["_attn_implementation_internal"] = implementation
            if pad_token_id is not None:
                values["pad_token_id"] = pad_token_id
        for module, attribute, value in attributes:
            if module.__dict__.get(attribute) is value:
                del module.__dict__[attribute]


def register() -> None:
    """Register ``attend`` with Transformers; a second call changes nothing."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)
