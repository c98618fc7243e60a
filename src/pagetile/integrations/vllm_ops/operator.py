"""The functions as nodes of a graph, for ``torch.compile``; nothing has gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_SCALES = "str kv_cache_dtype, Tensor k_scale, Tensor v_scale"
_SCHEMAS = {
    "attend": (
        "Tensor(a!)[] outputs, Tensor query, Tensor key_cache, Tensor value_cache, "
        "SymInt num_kv_heads, float scale, Tensor block_tables, Tensor seq_lens, "
        "SymInt block_size, SymInt max_seq_len, Tensor? alibi_slopes, "
        f"{_SCALES}, SymInt[] sparsity"
    ),
    "write": (
        "bool is_packed, Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
        f"Tensor slot_mapping, {_SCALES}"
    ),
    "convert": "Tensor(a!) output, Tensor input, float scale, str kv_dtype",
}


def attend(*inputs: Any) -> None:
    """Call ``attention.attend`` with its inputs, by one node."""
    outputs, query, *others = inputs
    k_scale, v_scale = (_as_tensor(scale, query) for scale in others[10:12])
    tensors = [output.detach() for output in outputs], query, *others[:10], k_scale, v_scale
    _call("attend", *tensors, others[12:])


def write(*inputs: Any, is_packed: bool) -> None:
    """Call ``reshape_and_cache``, or without ``is_packed`` its other form, by one node."""
    scales = (_as_tensor(scale, inputs[0]) for scale in inputs[6:])
    _call("write", is_packed, *inputs[:6], *scales)


def convert(*inputs: Any) -> None:
    """Call ``convert_fp8`` by one node."""
    _call("convert", *inputs)


def _call(name: str, *inputs: Any) -> None:
    _operators[name](*(x.detach() if isinstance(x, Tensor) else x for x in inputs))


def _as_tensor(scale: Tensor | float, like: Tensor) -> Tensor:
    if isinstance(scale, Tensor):
        return scale
    return torch.full((1,), scale, dtype=torch.float32, device=like.device)


def _attend(outputs: Any, *inputs: Any) -> None:
    from .attention import attend

    attend(tuple(outputs), *inputs[:-1], *inputs[-1])


def _write(is_packed: bool, *inputs: Any) -> None:
    from . import cache

    (cache.reshape_and_cache if is_packed else cache.reshape_and_cache_flash)(*inputs)


def _convert(*inputs: Any) -> None:
    from .cache import convert_fp8

    convert_fp8(*inputs)


def _define(name: str, run: Any, *mutated: str) -> Any:
    found = torch.library.custom_op(
        f"pagetile::vllm_{name}", run, mutates_args=mutated, schema=f"({_SCHEMAS[name]}) -> ()"
    )
    found.register_fake(lambda *inputs: None)
    return found


_operators = {
    "attend": _define("attend", _attend, "outputs"),
    "write": _define("write", _write, "key_cache", "value_cache"),
    "convert": _define("convert", _convert, "output"),
}
