"""Call ``pagetile.window_attention`` on a framework's tensors."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ...ops.eager import in_forward_mode
from ...ops.window_attention import window_attention
from ...ops.window_attention.layout import from_heads, layout, to_heads


class WholeMap(NamedTuple):
    """Passed in place of a mask: the input is a whole map, to be cut into these windows."""

    window: tuple[int, ...]
    """No axis longer than the map's."""
    shift: tuple[int, ...]


def is_exporting() -> bool:
    """Whether ``torch.jit.trace``, ``torch.export`` or ``torch.onnx`` records what runs."""
    return torch._C._get_tracing_state() is not None or torch.compiler.is_exporting()


def must_fall_back(x: Tensor, mask: Tensor | None = None) -> bool:
    """Whether the framework's own code must run.

    It must under export, ``torch.fx`` (whose inputs are proxies), ``torch.func`` and forward-mode
    differentiation, for tensor subclasses such as distributed tensors, and for a mask that
    requires a gradient: our operator supports none of these.
    """
    return (
        not isinstance(x, Tensor)
        or is_exporting()
        or torch._C._are_functorch_transforms_active()
        or in_forward_mode()
        or is_traceable_wrapper_subclass(x)
        or (mask is not None and mask.requires_grad)
    )


def hooks_of(module: nn.Module) -> list[dict[int, Any]]:
    """The dictionaries of a module's hooks."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return [getattr(module, kind) for kind in kinds]


def has_hooks(module: nn.Module) -> bool:
    """Whether a call of the module runs hooks, or a forward replaced on the instance."""
    everywhere = nn.modules.module
    return bool(
        any(hooks_of(module))
        or everywhere._global_forward_hooks
        or everywhere._global_forward_pre_hooks
        or everywhere._global_backward_hooks
        or everywhere._global_backward_pre_hooks
        or "forward" in vars(module)
    )


def offsets(index: Tensor, num_tokens: int) -> Tensor:
    """Return ``rel_offsets`` for a framework's index of relative positions, square or flat.

    ``index[i, j] = u[i] - u[j] + centre``, so its first column is ``u`` plus a constant, which
    cancels. A map smaller than the window keeps the first ``num_tokens`` offsets of the whole
    window, as MONAI's checkpoints were trained.
    """
    first_column = index.view(-1)[:: math.isqrt(index.numel())]
    return first_column[:num_tokens].to(torch.int32)


def continuous_bias(mlp: nn.Module, coords: Tensor) -> Tensor:
    """Compute Swin v2's bias table, ``[table_size, num_heads]``, by the model's network.

    The sigmoid commutes with the gather, so it is applied to the table and not to N × N entries.
    """
    return 16 * torch.sigmoid(mlp(coords).flatten(0, -2))


def attend(q: Tensor, k: Tensor, v: Tensor, num_heads: int, **arguments: Any) -> Tensor:
    """Window attention on ``[num_windows, num_tokens, num_heads * head_size]`` tensors."""

    def by_head(x: Tensor) -> Tensor:
        heads: Tensor = torch.unflatten(_without_subclass(x), -1, (num_heads, -1))
        return heads.transpose(1, 2)

    q, k, v = by_head(q), by_head(k), by_head(v)
    return window_attention(q, k, v, **arguments).out.transpose(1, 2).flatten(2)


def attend_packed(qkv: Tensor, num_heads: int, **arguments: Any) -> Tensor:
    """Window attention on a packed ``[num_windows, num_tokens, 3 * num_heads * head_size]``."""
    q, k, v = qkv.chunk(3, dim=-1)
    return attend(q, k, v, num_heads, **arguments)


def attend_map(
    qkv: Tensor, cut: WholeMap, num_heads: int, padding: Tensor | None, **arguments: Any
) -> Tensor:
    """Window attention on a whole map, ``[batch, *grid, 3 * num_heads * head_size]``.

    ``padding`` ``[3 * num_heads * head_size]`` is q, k and v of padded tokens; ``None``: zeros.
    """
    qkv = torch.unflatten(_without_subclass(qkv), -1, (3, num_heads, -1))
    if padding is not None:
        padding = padding.view(qkv.shape[-3:])
    map_layout = layout(tuple(qkv.shape[1:-3]), *cut, qkv.device)
    q, k, v = to_heads(qkv, map_layout, padding)
    out = window_attention(q, k, v, regions=map_layout.regions, **arguments).out
    return from_heads(out, map_layout).flatten(-2)


def _without_subclass(x: Tensor) -> Tensor:
    """Drop MONAI's tensor subclass; the residual connection keeps its metadata."""
    return x if type(x) is Tensor else x.as_subclass(Tensor)
