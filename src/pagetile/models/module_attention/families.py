"""Replacements of the attention methods of five families of Transformers' models.

Each function here makes the replacement of one method of one class. It computes queries, keys and
values as the class does, hands them to ``attention`` as Transformers' attention interface would,
and projects the result as the class does::

    bloom, mpt, falcon   forward(hidden_states, ...)      projections are repeated here
    gptj, gpt_neo        _attn(query, key, value, mask)   projections and rotary stay the module's

``adapters`` compares each with the module's own forward before it is used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import UnsupportedError
from ..attention import SLOT
from ..fused import own_forward
from .bias import KeyBias, append_bias

Attention = Callable[..., tuple[Tensor, Any]]
"""``(module, q, k, v, mask, *, scaling, ...)`` to ``[1, num_tokens, num_heads, v_head_size]``."""


@dataclass(frozen=True)
class Family:
    """A class of attention modules, and how it is replaced.

    Attributes:
        method: The method that is replaced.
        make: Returns the replacement, from a module, the attention to call, and the bias.
        bias: The argument of ``forward`` that holds an ALiBi bias, if there may be one.
        needs_mask: Whether its model fails without an attention mask.
    """

    method: str
    make: Callable[[Any, Attention, KeyBias | None], Callable[..., Any]]
    bias: str | None = None
    needs_mask: bool = False


def _bloom(module: Any, attention: Attention, bias: KeyBias | None) -> Callable[..., Any]:
    slopes = None if bias is None else module.beta * bias.slopes

    def forward(
        hidden_states: Tensor, residual: Tensor, alibi: Tensor, attention_mask: Any, **_: Any
    ) -> tuple[Tensor, None]:
        q, k, v = module._reshape(module.query_key_value(hidden_states))
        out, _weights = attention(
            module, q, k, v, attention_mask, scaling=module.inv_norm_factor, alibi_slopes=slopes
        )
        return module.dense(out.flatten(2)) + residual, None

    return forward


def _mpt(module: Any, attention: Attention, bias: KeyBias | None) -> Callable[..., Any]:
    slopes = None if bias is None else bias.slopes
    sizes = module.n_heads, module.head_dim

    def forward(
        hidden_states: Tensor, position_bias: Tensor, attention_mask: Any = None, **_: Any
    ) -> tuple[Tensor, None]:
        qkv = module.Wqkv(hidden_states)
        if module.clip_qkv:
            qkv = qkv.clamp(min=-module.clip_qkv, max=module.clip_qkv)
        q, k, v = (part.unflatten(2, sizes).transpose(1, 2) for part in qkv.chunk(3, dim=2))
        if attention_mask is not None and attention_mask.numel() == 1:
            attention_mask = None  # it was a placeholder that its model needs
        out, _weights = attention(
            module, q, k, v, attention_mask, scaling=module.softmax_scale, alibi_slopes=slopes
        )
        return module.out_proj(out.flatten(2)), None

    return forward


def _falcon(module: Any, attention: Attention, bias: KeyBias | None) -> Callable[..., Any]:
    num_heads, num_kv_heads, size = module.num_heads, module.num_kv_heads, module.head_dim
    rotate = type(module).forward.__globals__["apply_rotary_pos_emb"]
    scaling = module.inv_norm_factor
    slopes = bias.slopes * scaling if bias is not None and bias.is_linear else None
    is_grouped = module.new_decoder_architecture or not module.multi_query

    def split(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if is_grouped:  # a group's queries, its key, its value, and the next group
            qkv = qkv.view(1, qkv.shape[1], num_kv_heads, -1, size)
            q, k, v = qkv[..., :-2, :].flatten(2, 3), qkv[..., -2, :], qkv[..., -1, :]
        else:
            qkv = qkv.view(1, qkv.shape[1], -1, size)
            q, k, v = qkv[..., :-2, :], qkv[..., -2:-1, :], qkv[..., -1:, :]
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def forward(
        hidden_states: Tensor,
        alibi: Tensor | None,
        attention_mask: Any,
        position_ids: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        q, k, v = split(module.query_key_value(hidden_states))
        if (alibi is None) is not (bias is None):
            raise UnsupportedError("it uses ALiBi in some calls and not in others")
        if alibi is None:
            q, k = rotate(q, k, *position_embeddings)  # type: ignore[misc]
        elif bias is not None and not bias.is_linear:
            assert position_ids is not None
            _check_cache(module)
            q, k = append_bias(q, k, bias.at(position_ids[0]))
        out, _weights = attention(
            module, q, k, v, attention_mask, scaling=scaling, alibi_slopes=slopes
        )
        return module.dense(out.flatten(2)), None

    assert num_heads % num_kv_heads == 0
    return forward


def _check_cache(module: nn.Module) -> None:
    """Raise UnsupportedError if the keys of a module have no room for a bias beside them."""
    k_cache = getattr(vars(module).get(SLOT), "k_cache", None)
    if k_cache is not None and k_cache.element_size() == 1:
        raise UnsupportedError(
            f"{type(module).__name__} stores its ALiBi bias beside its keys, which needs keys of "
            "16 bits or more: leave kv_cache_dtype out"
        )


def _gptj(module: Any, attention: Attention, bias: KeyBias | None) -> Callable[..., Any]:
    scaling = 1 / module.scale_attn

    def attend(query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None) -> Any:
        out, _weights = attention(module, query, key, value, attention_mask, scaling=scaling)
        return out.transpose(1, 2), None

    return attend


def _gpt_neo(module: Any, attention: Attention, bias: KeyBias | None) -> Callable[..., Any]:
    window = _read_window(module)

    def attend(query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None) -> Any:
        mask = attention_mask
        if hasattr(mask, "is_visible"):
            mask = _combine(mask, module.bias)
        out, _weights = attention(
            module, query, key, value, mask, scaling=1.0, sliding_window=window
        )
        return out.transpose(1, 2), None

    return attend


def _read_window(module: nn.Module) -> int | None:
    """Return the number of keys that each row of a module's mask shows; ``None``: all."""
    shown: Tensor = module.bias[0, 0]  # type: ignore[index]
    size = len(shown)
    window = int(shown[-1].sum())
    band = torch.ones_like(shown).tril_().triu_(1 - window)
    if not torch.equal(shown, band):
        raise UnsupportedError(
            f"the mask of {type(module).__name__} is not that of a window of {window} keys"
        )
    return None if window == size else window


def _combine(mask: Tensor, own: Tensor) -> Tensor:
    """Return the conjunction of the model's mask and the module's own buffer."""
    combined = mask.clone()
    visible = mask.is_visible  # type: ignore[attr-defined]

    def is_visible(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        both: Tensor = visible(batch, head, q, k) & own[0, 0].to(q.device)[q, k]
        return both

    combined.is_visible = is_visible  # type: ignore[attr-defined]
    return combined


FAMILIES = {
    "BloomAttention": Family("forward", _bloom, bias="alibi"),
    "MptAttention": Family("forward", _mpt, bias="position_bias", needs_mask=True),
    "FalconAttention": Family("forward", _falcon, bias="alibi"),
    "GPTJAttention": Family("_attn", _gptj),
    "GPTNeoSelfAttention": Family("_attn", _gpt_neo),
}
"""By the name of Transformers' class."""

MODEL_TYPES = frozenset({"bloom", "mpt", "falcon", "gptj", "gpt_neo"})
"""Types of models that are made of these classes."""


def find_family(module: nn.Module) -> Family | None:
    """Return the family of a module with Transformers' own forward; ``None`` for others."""
    function = own_forward(module)
    if function is None or not function.__module__.startswith("transformers.models."):
        return None
    name = function.__qualname__.removesuffix(".forward")
    family = FAMILIES.get(name)
    if family is None or family.method == "forward":
        return family
    own = getattr(type(module), family.method)
    is_own = family.method not in vars(module) and own.__qualname__ == f"{name}.{family.method}"
    return family if is_own else None
