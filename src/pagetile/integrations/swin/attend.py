"""From a framework's tensors to ``pagetile.window_attention`` and back."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ...ops.eager import in_forward_mode
from ...ops.window_attention import window_attention
from ...ops.window_attention.layout import from_heads, layout, to_heads

__all__ = [
    "WholeMap",
    "attend",
    "attend_map",
    "attend_packed",
    "continuous_bias",
    "hooks_of",
    "is_watched",
    "offsets",
    "stands_aside",
    "writes_down",
]


class WholeMap(NamedTuple):
    """In a mask's place: what is attended to is a whole map, to be cut into windows like this."""

    window: tuple[int, ...]
    """No axis longer than the map's."""
    shift: tuple[int, ...]


def writes_down() -> bool:
    """Whether what runs is being written down, and must be the framework's own operations.

    By ``torch.jit.trace`` or ``torch.export``, and ``torch.onnx`` over them.
    """
    return torch._C._get_tracing_state() is not None or torch.compiler.is_exporting()


def stands_aside(x: Tensor, mask: Tensor | None = None) -> bool:
    """Whether the framework's own code must run.

    When it is written down, also by ``torch.fx``, which hands in proxies; for distributed tensors
    and the like, under ``torch.func`` and in forward-mode differentiation, which know the
    framework's operations and not ours; for a mask that learns.
    """
    return (
        not isinstance(x, Tensor)
        or writes_down()
        or torch._C._are_functorch_transforms_active()
        or in_forward_mode()
        or is_traceable_wrapper_subclass(x)
        or (mask is not None and mask.requires_grad)
    )


def hooks_of(module: nn.Module) -> list[dict[int, Any]]:
    """All hooks of a module's calls, by kind."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return [getattr(module, kind) for kind in kinds]


def is_watched(module: nn.Module) -> bool:
    """Whether somebody waits for a call of the module: by hooks, or a forward of its own."""
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
    """``rel_offsets`` of a framework's index of relative positions, square or flat.

    ``index[i, j] = u[i] - u[j] + centre``, so its first column is ``u`` up to a constant, and only
    differences count. A map smaller than the window keeps the first ``num_tokens`` offsets of the
    whole window, which is what MONAI's checkpoints were trained with.
    """
    first_column = index.view(-1)[:: math.isqrt(index.numel())]
    return first_column[:num_tokens].to(torch.int32)


def continuous_bias(mlp: nn.Module, coords: Tensor) -> Tensor:
    """Swin v2's bias table, ``[table_size, num_heads]``: the model's own network on every offset.

    The sigmoid commutes with the gather, so it is taken of the table and not of N × N entries.
    """
    return 16 * torch.sigmoid(mlp(coords).flatten(0, -2))


def attend(q: Tensor, k: Tensor, v: Tensor, num_heads: int, **arguments: Any) -> Tensor:
    """Window attention of ``[num_windows, num_tokens, num_heads * head_size]`` tensors."""
    q, k, v = (
        torch.unflatten(_plain(x), -1, (num_heads, x.shape[-1] // num_heads)).transpose(1, 2)
        for x in (q, k, v)
    )
    return window_attention(q, k, v, **arguments).out.transpose(1, 2).flatten(2)


def attend_packed(qkv: Tensor, num_heads: int, **arguments: Any) -> Tensor:
    """The same of ``[num_windows, num_tokens, 3 * num_heads * head_size]``."""
    q, k, v = qkv.chunk(3, dim=-1)
    return attend(q, k, v, num_heads, **arguments)


def attend_map(
    qkv: Tensor, cut: WholeMap, num_heads: int, padding: Tensor | None, **arguments: Any
) -> Tensor:
    """Of a whole map, ``[batch, *grid, 3 * num_heads * head_size]``: two copies, by index.

    ``padding`` ``[3 * num_heads * head_size]`` is what padded tokens have; ``None``: zeros.
    """
    qkv = torch.unflatten(_plain(qkv), -1, (3, num_heads, -1))
    if padding is not None:
        padding = padding.view(qkv.shape[-3:])
    where = layout(tuple(qkv.shape[1:-3]), *cut, qkv.device)
    q, k, v = to_heads(qkv, where, padding)
    out = window_attention(q, k, v, regions=where.regions, **arguments).out
    return from_heads(out, where).flatten(-2)


def _plain(x: Tensor) -> Tensor:
    """MONAI's tensors carry metadata, which the residual connection keeps."""
    return x if type(x) is Tensor else x.as_subclass(Tensor)
