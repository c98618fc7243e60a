"""Peers on a GPU that need torch alone; other libraries are in ``libraries``.

SDPA has no soft cap; FlexAttention has.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

from .case import COMPILED_ELSEWHERE
from .gpu_inputs import Inputs

_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}

Peers = dict[str, Callable[[], Any]]


def reader(inputs: Inputs) -> Peers:
    """A kernel that only reads the pages of sequences of one length; it returns nothing."""
    if len(set(inputs.seq_lens)) > 1 or inputs.q.device.type == "cpu":
        return {}
    from .reading import make_reader  # Triton's

    return {"reading alone": make_reader(inputs.k_cache, inputs.v_cache, inputs.batch)}


def decode_peers(inputs: Inputs, *, has_flex: bool = True) -> Peers:
    """SDPA over contiguous keys and values, a group's heads as rows, and with a gather; Flex.

    With capped scores, only FlexAttention.
    """
    if len(set(inputs.seq_lens)) > 1 or inputs.shape.scales:
        return {}
    q, k, v = inputs.dense()
    soft_cap = inputs.shape.logits_soft_cap
    peers: Peers = {"flex": _flex(q, k, v, soft_cap=soft_cap)} if has_flex else {}
    if soft_cap is None:
        rows = q.view(*k.shape[:2], -1, q.shape[-1])
        peers |= {f"sdpa {name}": _call(backend, rows, k, v) for name, backend in _BACKENDS.items()}

        def gather() -> Tensor:
            _, keys, values = inputs.dense()
            return sdpa(rows, keys, values)

        peers["gather + sdpa"] = gather
    return peers


def prefill_peers(inputs: Inputs, *, has_flex: bool = True) -> Peers:
    """SDPA by each of its backends, over contiguous keys and values, and FlexAttention.

    SDPA by cuDNN also with a gather.
    """
    q, k, v = inputs.dense()
    soft_cap = inputs.shape.logits_soft_cap
    flex = _flex(q, k, v, causal=inputs.causal, soft_cap=soft_cap)
    peers: Peers = {"flex": flex} if has_flex else {}
    if soft_cap is None:
        how = {"is_causal": inputs.causal, "enable_gqa": q.shape[1] > k.shape[1]}
        peers |= {f"sdpa {name}": _call(of, q, k, v, **how) for name, of in _BACKENDS.items()}

        def gather() -> Tensor:
            return _call(_BACKENDS["cudnn"], *inputs.dense(), **how)()

        peers["gather + sdpa cudnn"] = gather
    return peers


def find_absent(inputs: Inputs, *, has_flex: bool = True) -> dict[str, str]:
    """Why SDPA or FlexAttention is not among ``decode_peers`` or ``prefill_peers``."""
    reason = None
    if inputs.shape.scales:
        reason = "unsupported: caches of 8 bits"
    elif len(set(inputs.seq_lens)) > 1:
        reason = "unsupported: sequences of several lengths"
    absent = {} if reason is None else {"sdpa": reason, "flex": reason}
    if inputs.shape.logits_soft_cap is not None:
        absent.setdefault("sdpa", "unsupported: a soft cap")
    if not has_flex:
        absent.setdefault("flex", COMPILED_ELSEWHERE)
    return absent


def _call(backend: SDPBackend, *qkv: Any, **options: Any) -> Callable[[], Tensor]:
    def call() -> Tensor:
        with sdpa_kernel(backend):
            return sdpa(*qkv, **options)

    return call


def _flex(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, soft_cap: float | None = None
) -> Callable[[], Any]:
    cap_score: Callable[..., Tensor] | None = None
    if soft_cap is not None:

        def cap_score(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return soft_cap * torch.tanh(score / soft_cap)

    is_grouped = q.shape[1] > k.shape[1]

    @functools.cache
    def compiled() -> Callable[..., Any]:
        return compile_flex(q.shape[2] if causal else None, q.device.type)

    return lambda: compiled()(q, k, v, score_mod=cap_score, enable_gqa=is_grouped)


def compile_flex(causal_length: int | None, device: str) -> Callable[..., Any]:
    """FlexAttention compiled for one length; compiled for any length, it is slower.

    ``causal_length`` is the length of a causal square; None: no mask.
    """
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch.compiler.reset()  # torch compiles a function at most eight times
    compiled: Any = torch.compile(flex_attention, dynamic=False)  # a cap is a constant as well
    mask = None
    if causal_length is not None:
        size = causal_length
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, size, size, device)
    return functools.partial(compiled, block_mask=mask)
