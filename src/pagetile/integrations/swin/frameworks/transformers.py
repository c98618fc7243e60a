"""Replacements for Transformers' Swin and Swinv2."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.models.swin import modeling_swin
from transformers.models.swinv2 import modeling_swinv2

from ..attend import attend, continuous_bias, is_exporting, offsets
from ..masks import dense_mask
from ..proof import mask_of, windows
from ..report import heads, times
from ..swapped import Randn, SwappedAttention, SwappedLayer, Swaps


class SwinAttention(SwappedAttention, modeling_swin.SwinAttention):
    """Returns no attention weights, as the original does unless its attention is eager."""

    original = modeling_swin.SwinAttention
    bypassed = ("relative_position_bias",)

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """``hidden_states`` ``[num_windows, num_tokens, hidden_size]``."""
        bias = self.relative_position_bias
        if self._needs_weights_or_other_code(hidden_states, attention_mask, kwargs):
            mask = dense_mask(attention_mask, hidden_states.dtype)
            return self.original.forward(self, hidden_states, mask, **kwargs)
        out = attend(
            self.q_proj(hidden_states),
            self.k_proj(hidden_states),
            self.v_proj(hidden_states),
            self.num_attention_heads,
            bias_table=bias.relative_position_bias_table,
            rel_offsets=offsets(bias.relative_position_index, bias.window_area),
            softmax_scale=self.scaling,
            **self.region_memory.of_mask(attention_mask),
        )
        return self.o_proj(out), None

    def _needs_weights_or_other_code(
        self, x: Tensor, mask: Tensor | None, options: dict[str, Any]
    ) -> bool:
        chosen = self.config._attn_implementation
        wanted = options.get("output_attentions", getattr(self.config, "output_attentions", False))
        # A hook may read the eager attention's weights. A window clamped to a small map does not
        # fit the table, for which the original raises the error.
        return bool(
            self.needs_original(x, mask)
            or wanted
            or chosen not in (None, "eager", "sdpa")
            or (chosen != "sdpa" and self._forward_hooks)
            or x.shape[1] != self.relative_position_bias.window_area
        )

    @staticmethod
    def variant(module: Any) -> str:
        return f"Transformers Swin, window {times(module.relative_position_bias.window_size)}"

    @staticmethod
    def width(module: Any) -> str:
        return heads(module.o_proj.in_features, module.num_attention_heads)

    @staticmethod
    def weight_dropout(module: Any) -> float:
        return float(module.attention_dropout)

    @staticmethod
    def trial(module: Any, randn: Randn) -> Tensor:
        area = module.relative_position_bias.window_area
        x, mask = windows(area, module.o_proj.out_features, randn)
        return torch.cat((module(x, mask)[0], module(x)[0]))


class Swinv2SelfAttention(SwappedAttention, modeling_swinv2.Swinv2SelfAttention):
    """Cosine attention. The original adds the mask twice, and models are trained that way."""

    original = modeling_swinv2.Swinv2SelfAttention
    bypassed = ("dropout",)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        output_attentions: bool | None = False,
    ) -> tuple[Tensor, ...]:
        """``hidden_states`` ``[num_windows, num_tokens, dim]``."""
        if output_attentions or self.needs_original(hidden_states, attention_mask):
            mask = dense_mask(attention_mask, hidden_states.dtype)
            return self.original.forward(self, hidden_states, mask, output_attentions)
        out = attend(
            self.query(hidden_states),
            self.key(hidden_states),
            self.value(hidden_states),
            self.num_attention_heads,
            bias_table=continuous_bias(
                self.continuous_position_bias_mlp, self.relative_coords_table
            ),
            rel_offsets=offsets(self.relative_position_index, hidden_states.shape[1]),
            logit_scale=self.logit_scale,
            **self.region_memory.of_mask(attention_mask, times=2),
        )
        return (out,)

    @staticmethod
    def variant(module: Any) -> str:
        return f"Transformers Swinv2, window {times(module.window_size)}"

    @staticmethod
    def width(module: Any) -> str:
        return heads(module.all_head_size, module.num_attention_heads)

    @staticmethod
    def weight_dropout(module: Any) -> float:
        return float(module.dropout.p)

    @staticmethod
    def trial(module: Any, randn: Randn) -> Tensor:
        x, mask = windows(len(module.relative_position_index), module.all_head_size, randn)
        return torch.cat((module(x, mask)[0], module(x)[0]))


class _Layer(SwappedLayer):
    """Base of the layers of both models: square windows, with one shift for both axes."""

    window_size: int
    shift_size: int

    def get_attn_mask(
        self, height: int, width: int, dtype: torch.dtype, device: torch.device | None = None
    ) -> Tensor | None:
        """Return the mask of a padded map."""
        if self.shift_size <= 0 or is_exporting() or not self.applies(self):
            return self.original.get_attn_mask(self, height, width, dtype, device)
        window, shift = (self.window_size,) * 2, (self.shift_size,) * 2
        device = torch.device(device or "cpu")
        return self.region_memory.of_grid((height, width), window, shift, device)

    @classmethod
    def applies(cls, module: Any) -> bool:
        return bool(module.shift_size > 0) and super().applies(module)

    @staticmethod
    def variant(module: Any) -> str:
        return f"Transformers, window {times((module.window_size,) * 2)}, shift {module.shift_size}"

    @staticmethod
    def width(module: Any) -> str:
        return f"{module.layernorm_before.normalized_shape[0]} channels"

    @staticmethod
    def trial(module: Any, randn: Randn) -> Tensor:
        height, width = 3 * module.window_size, 2 * module.window_size
        return mask_of(module.get_attn_mask(height, width, torch.float64, torch.device("cpu")))


class SwinLayer(_Layer, modeling_swin.SwinLayer):
    """The layer of Swin."""

    original = modeling_swin.SwinLayer

    @staticmethod
    def attentions_of(module: Any) -> list[Any]:
        return [module.attention]


class Swinv2Layer(_Layer, modeling_swinv2.Swinv2Layer):
    """The layer of Swinv2."""

    original = modeling_swinv2.Swinv2Layer

    @staticmethod
    def attentions_of(module: Any) -> list[Any]:
        return [module.attention.self]


SWAPS: Swaps = {
    swap.original: swap for swap in (SwinAttention, Swinv2SelfAttention, SwinLayer, Swinv2Layer)
}
