"""``pagetile plan``: how many tokens and sequences fit, before anything is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from rich.console import Console
from rich.table import Table

from ..errors import RequestError, plural
from .options import BlockSize, CacheDtype, Dtype, MaxModelLen, Model, option
from .output import aligned, make_table

if TYPE_CHECKING:
    from ..analysis.lengths import LengthDistribution
    from ..analysis.memory import MemoryPlan, Occupancy

EXAMPLES = """
[bold]Examples[/bold]
  pagetile plan --model my-checkpoint --memory 80GB
  pagetile plan --model my-checkpoint --memory 80GB --mean-len 300
  pagetile plan --model my-checkpoint --memory 80GB --kv-cache-dtype fp8_e4m3
  pagetile plan --lengths 130,250,1900 --block-size 32
"""


def plan(
    memory: Annotated[
        str | None,
        option(
            None,
            "SIZE",
            "For weights and cache, such as 16GiB or 80GB. Without it, 90% of what is free on the "
            "GPU, or, if PyTorch finds none, here.",
        ),
    ] = None,
    mean_len: Annotated[
        float | None,
        option(None, "N", "Sequences of this many tokens on average, geometrically distributed."),
    ] = None,
    lengths: Annotated[
        str | None,
        option(
            None,
            "LIST",
            "Sequences of just these lengths, such as 130,250,1900, or of a range, such as "
            "1-2048. Without it, any length that the model allows.",
        ),
    ] = None,
    model: Model = None,
    dtype: Dtype = "auto",
    kv_cache_dtype: CacheDtype = "auto",
    block_size: BlockSize = 16,
    max_model_len: MaxModelLen = None,
) -> None:
    """Say how many sequences fit into memory, and how much of it is unused.

    Reads the checkpoint's config and the headers of its weight files; no weight
    is loaded, and no GPU is needed.
    """
    from ..analysis.checkpoint import ELEMENT_BYTES, read_checkpoint
    from ..analysis.memory import parse_bytes, plan_memory
    from ..demo import path

    num_bytes = None if memory is None else parse_bytes(memory)
    if memory is not None and memory.isdigit() and int(memory) < 1 << 20:
        raise RequestError(f"--memory {memory} is {memory} bytes: did you mean {memory}GiB?")
    torch_names: dict[str, str] = {"half": "float16", "float": "float32"}
    checkpoint = read_checkpoint(
        path() if model is None else model,
        dtype=torch_names.get(dtype, dtype),
        max_model_len=max_model_len,
    )
    longest = checkpoint.max_model_len
    if longest is None:
        raise RequestError("the model's config knows no longest sequence: give --max-model-len")
    cache_dtype = checkpoint.dtype if kv_cache_dtype == "auto" else kv_cache_dtype
    result = plan_memory(
        checkpoint.layers,
        memory_bytes=_free_memory() if num_bytes is None else num_bytes,
        max_model_len=longest,
        weight_bytes=checkpoint.weight_bytes or 0,
        element_bytes=ELEMENT_BYTES.get(cache_dtype, 1),
        block_size=block_size,
        scale_bytes=0 if cache_dtype in ELEMENT_BYTES else 8,
    )
    chosen = _choose_lengths(mean_len, lengths, longest)
    load = _load_table(result, result.occupancy(chosen), chosen.mean)
    console = Console(highlight=False)
    kept = "" if cache_dtype == checkpoint.dtype else f", cache {cache_dtype}"
    console.print(f"[bold]{checkpoint.model_type}[/bold], {checkpoint.dtype}{kept}\n")
    console.print(_layer_table(result))
    console.print()
    console.print(aligned(_fit_rows(result, has_weights=checkpoint.weight_bytes is not None)))
    console.print(f"\nWith {chosen} ({chosen.mean:,.1f} tokens on average):\n")
    console.print(load)


def _free_memory() -> int:
    from ..device import available_memory, default_device

    return available_memory(default_device()) * 9 // 10


def _choose_lengths(
    mean_len: float | None, lengths: str | None, longest: int
) -> LengthDistribution:
    from ..analysis.lengths import GeometricLengths, UniformLengths, parse_lengths

    if mean_len is not None and lengths is not None:
        raise RequestError("--mean-len and --lengths are both given: leave one of them out")
    if mean_len is not None:
        return GeometricLengths(mean_len, longest)
    return UniformLengths(1, longest) if lengths is None else parse_lengths(lengths)


def _layer_table(plan: MemoryPlan) -> Table:
    headers = ("heads", "KV heads", "head size", "sees", "bytes per token")
    table = make_table("layers", *headers)
    for kind in plan.layers:
        sizes = {kind.head_size, kind.v_head_size}
        table.add_row(
            f"{kind.num_layers} {kind.name}{', shared' * kind.is_shared}",
            f"{kind.num_heads}",
            f"{kind.num_kv_heads}",
            "+".join(map(str, sorted(sizes, reverse=True))),
            "all" if kind.sliding_window is None else f"{kind.sliding_window:,}",
            f"{plan.layer_bytes(kind):,}",
        )
    if len(plan.layers) > 1:
        table.add_row("all", "", "", "", "", f"{plan.bytes_per_token:,}")
    return table


def _fit_rows(plan: MemoryPlan, *, has_weights: bool) -> dict[str, str]:
    from ..analysis.memory import format_bytes

    full = plan.max_model_len
    held, visible = full * plan.bytes_per_token, plan.visible_bytes(full)
    rows = {
        "memory": format_bytes(plan.memory_bytes),
        "weights": format_bytes(plan.weight_bytes)
        if has_weights
        else "not known: no safetensors files",
        "cache": f"{format_bytes(plan.cache_bytes)}: {plural(plan.num_blocks, 'block')} of "
        f"{plan.block_size} tokens, {format_bytes(plan.block_bytes)} each",
        "tokens": f"{plan.num_tokens:,}",
        "sequences": f"{plan.num_full_sequences:,} of {full:,} tokens",
    }
    if visible < held:
        share = f"{visible / held:.0%} of what a sequence holds is still in sight"
        rows["windows"] = f"at {full:,} tokens, {share}"
    return rows


def _load_table(plan: MemoryPlan, occupancy: Occupancy, mean: float) -> Table:
    table = make_table("", "in pages", f"{plan.max_model_len:,} slots reserved for each")
    table.columns[0].style = "dim"
    table.add_row(
        "sequences that fit", f"{int(occupancy.num_sequences):,}", f"{occupancy.num_reserved:,}"
    )
    table.add_row(
        "unused slots of each", f"{occupancy.num_unused:,.1f}", f"{plan.max_model_len - mean:,.1f}"
    )
    table.add_row("wasted", f"{occupancy.waste:.1%}", f"{occupancy.reserved_waste:.1%}")
    return table
