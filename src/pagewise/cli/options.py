"""Options that several commands have."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

__all__ = ["BlockSize", "Dtype", "DtypeName", "MaxModelLen", "Model", "flag", "option"]

MODEL = "Model and cache"


def option(panel: str | None, metavar: str, help: str, *names: str, **settings: Any) -> Any:
    """An option; one without a default of its own is to say in ``help`` what happens then."""
    return typer.Option(*names, metavar=metavar, help=help, rich_help_panel=panel, **settings)


def flag(panel: str | None, name: str, help: str) -> Any:
    """A switch that is off by default."""
    return option(panel, "", help, name, show_default=False)


class DtypeName(str, Enum):
    """Element types of weights and cache."""

    auto = "auto"
    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"


Model = Annotated[
    Path | None,
    option(
        MODEL,
        "DIR",
        "A Hugging Face checkpoint. Without it, the small model of Python code that comes along.",
    ),
]
Dtype = Annotated[
    DtypeName,
    option(
        MODEL, "TYPE", "Of weights and cache: auto (the checkpoint's), float32, float16, bfloat16."
    ),
]
BlockSize = Annotated[int, option(MODEL, "N", "Tokens per cache block, 1 to 256.")]
MaxModelLen = Annotated[
    int | None,
    option(MODEL, "N", "The most tokens of a sequence. Without it, what the model allows."),
]
