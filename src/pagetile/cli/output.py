"""Printing to the terminal: text, streams and tables."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from itertools import chain, islice
from typing import TYPE_CHECKING

import typer
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from rich.console import Console

    from ..engine.outputs import Delta
    from .run import Run


def make_table(first: str, *others: str) -> Table:
    """Return an empty table of numbers with headers; row names are on the left."""
    table = Table(box=None, pad_edge=False, padding=(0, 0, 0, 2), header_style="dim")
    table.add_column(first, no_wrap=True)
    for header in others:
        table.add_column(header, justify="right", no_wrap=True)
    return table


def stream_one(deltas: Iterator[Delta], before: str, console: Console) -> None:
    """Write text as it comes, after a prefix, and end the line."""
    with console.status("Computing the prompt"):
        first = list(islice(deltas, 1))
    text = before
    try:
        typer.echo(before, nl=False)
        for delta in chain(first, deltas):
            typer.echo(delta.text, nl=False)
            text = delta.text or text
    except KeyboardInterrupt:
        typer.echo()
        raise
    typer.echo("", nl=not text.endswith("\n"))


def print_in_order(deltas: Iterator[Delta], run: Run, *, echo: bool, show_bar: bool) -> None:
    """Write every continuation under a header, as soon as it and all before it are done."""
    from tqdm import tqdm

    texts = {key: run.prompts[key[0]] if echo else "" for key in run.keys}
    waiting, done = deque(run.keys), set()
    with tqdm(
        total=len(run.keys), desc="Generating", unit="seq", leave=False, disable=not show_bar
    ) as bar:
        for delta in deltas:
            key = delta.request_id, delta.index
            texts[key] += delta.text
            bar.set_postfix_str(f"{run.num_output_tokens / run.seconds:.0f} tok/s", refresh=False)
            if delta.finish_reason is None:
                continue
            done.add(key)
            bar.update()
            while waiting and waiting[0] in done:
                key = waiting.popleft()
                with tqdm.external_write_mode():
                    space = "" if key == run.keys[0] else "\n"
                    typer.secho(f"{space}--- {run.name(*key)} ---", bold=True)
                    text = texts.pop(key)
                    typer.echo(text, nl=not text.endswith("\n"))


def wide_console() -> Console:
    """Return a console for tables; without a terminal it is wide enough not to cut numbers."""
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=160)


def aligned(rows: Mapping[str, str]) -> Text:
    """Return names and values in two columns."""
    width = max(map(len, rows))
    lines = [Text.assemble((f"{name:{width}}  ", "dim"), value) for name, value in rows.items()]
    return Text("\n").join(lines)
