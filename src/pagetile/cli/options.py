"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ..errors import RequestError

MODEL = "Model and cache"


def option(panel: str | None, metavar: str, help: str, *names: str, **settings: Any) -> Any:
    """An option; one without a default of its own is to say in ``help`` what happens then."""
    return typer.Option(*names, metavar=metavar, help=help, rich_help_panel=panel, **settings)


def flag(panel: str | None, name: str, help: str) -> Any:
    """A switch that is off by default."""
    return option(panel, "", help, name, show_default=False)


def show_help(context: typer.Context) -> None:
    """Show what the commands of a group are, where none is given."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), nl=False)


def parse_sizes(text: str, name: str, *, count: int | None = None, least: int = 1) -> list[int]:
    """Whole numbers with commas between them, such as ``7,7,7``.

    Args:
        text: As it was given.
        name: Of the option, for the message.
        count: How many they must be.
        least: The least that any may be.

    Raises:
        RequestError: They are not.
    """
    try:
        sizes = [int(word) for word in text.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < least or (count is not None and len(sizes) != count):
        wanted = ",".join(str(max(least, size)) for size in (64, 128, 256)[: count or 2])
        raise RequestError(
            f"{name} {text}: expected {count or 'some'} whole numbers of at least {least}, with "
            f"commas, such as {wanted}"
        )
    return sizes


def parse_grid(grid: str, window: str, shift: str | None) -> tuple[list[int], list[int], list[int]]:
    """A map, its windows and their shift, by default half a window.

    Raises:
        RequestError: They are not whole numbers.
    """
    extents = parse_sizes(window, "--window")
    steps = [w // 2 for w in extents] if shift is None else parse_sizes(shift, "--shift", least=0)
    return parse_sizes(grid, "--grid"), extents, steps


Model = Annotated[
    Path | None,
    option(
        MODEL,
        "DIR",
        "Folder of a Hugging Face checkpoint. Without it, the small model of Python code that "
        "ships with pagetile.",
    ),
]
Dtype = Annotated[
    Literal["auto", "float32", "float16", "bfloat16", "half", "float"],  # the last two as in vLLM
    option(
        MODEL,
        "TYPE",
        "Element type of weights and cache: auto (the checkpoint's), float32, float16, bfloat16.",
    ),
]
CacheDtype = Annotated[
    Literal["auto", "float32", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "int8"],
    option(
        MODEL,
        "TYPE",
        "Element type of the KV cache: auto (that of the weights), fp8 (fp8_e4m3), fp8_e5m2 or "
        "int8, with a scale for each token and head, or one of --dtype's.",
        "--kv-cache-dtype",
    ),
]
Device = Annotated[
    str | None,
    option(
        MODEL, "NAME", "Where to run: cpu, cuda, cuda:1. Without it on a GPU, if PyTorch finds one."
    ),
]
Element = Annotated[
    Literal["float32", "float16", "bfloat16"],
    option(None, "TYPE", "float32, float16 or bfloat16.", "--dtype"),
]
Causal = Annotated[bool, flag(None, "--causal", "See no later key.")]
SlidingWindow = Annotated[
    int | None, option(None, "N", "See no key before the last N, the query's own included.")
]
BlockSize = Annotated[int, option(MODEL, "N", "Tokens per cache block, 1 to 256.")]
NumBlocks = Annotated[
    int | None,
    option(MODEL, "N", "Blocks of the cache. Without it, as many as fit and can be used."),
]
MaxNumSeqs = Annotated[int, option(MODEL, "N", "Most sequences in one step.")]
NoPrefixCaching = Annotated[
    bool, flag(MODEL, "--no-prefix-caching", "Do not share blocks between equal prefixes.")
]
NoGenerationConfig = Annotated[
    bool,
    flag(
        MODEL,
        "--no-generation-config",
        "Do not take sampling defaults from the checkpoint's generation_config.json.",
    ),
]
MaxModelLen = Annotated[
    int | None,
    option(
        MODEL,
        "N",
        "Most tokens of a sequence, prompt and output. Without it, what the model allows.",
    ),
]
Speculative = Annotated[
    Literal["ngram"] | None,
    option(
        MODEL,
        "HOW",
        "ngram: draft the tokens that followed the same n-gram earlier, and verify them. The text "
        "is the same; repetitive text is faster.",
    ),
]
NumSpeculativeTokens = Annotated[
    int | None, option(MODEL, "N", "Most tokens of a draft, 1 to 15. Without it, 7.")
]
