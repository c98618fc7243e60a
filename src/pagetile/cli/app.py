"""The commands and their help. This module does not import torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from io import TextIOWrapper
from typing import Annotated

import typer

from . import bench, chat, explain, generate, plan, serve
from .options import show_help

COMPLETE = "_PAGETILE_COMPLETE"
"""Environment variable with which a shell requests completions."""

app = typer.Typer(
    name="pagetile",
    help="Run, serve and measure Hugging Face checkpoints over a paged KV cache.",
    epilog="Each command has its own help: [bold]pagetile generate --help[/bold]. "
    "[bold]pagetile --install-completion[/bold] lets the shell complete commands and options.",
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(epilog=generate.EXAMPLES)(generate.generate)
app.command(epilog=serve.EXAMPLES)(serve.serve)
app.command(epilog=chat.EXAMPLES)(chat.chat)
app.command(epilog=plan.EXAMPLES)(plan.plan)
app.add_typer(explain.explain, name="explain")
app.add_typer(bench.bench, name="bench")


def _show_version(wanted: bool) -> None:
    if wanted:
        from ..version import find_version

        typer.echo(f"pagetile {find_version()}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def pagetile(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and stop."
        ),
    ] = False,
) -> None:
    """Print the help where no command is given."""
    show_help(context)


def run(args: Sequence[str]) -> int:
    """Run a command; errors are raised, not printed.

    Returns:
        The exit code that the command asked for, 0 if it did not.
    """
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a model may write what a terminal cannot
    command = typer.main.get_command(app)
    if instruction := os.environ.get(COMPLETE):
        from typer.completion import shell_complete

        return shell_complete(command, {}, "pagetile", COMPLETE, instruction)
    try:
        with command.make_context("pagetile", list(args)) as context:
            command.invoke(context)
    except typer.Exit as end:
        return end.exit_code
    return 0
