"""``pagetile bench``: errors and times beside PyTorch's operations, with lower bounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table

from ..errors import RequestError, UnsupportedError
from .options import Causal, Element, SlidingWindow, flag, option, parse_grid, show_help
from .output import aligned, make_table, wide_console

if TYPE_CHECKING:
    import torch

    from ..analysis.roofline import Roofs
    from ..analysis.side_by_side import Contest, Result

bench = typer.Typer(
    help="Time pagetile's operations beside PyTorch's, with errors and least possible times."
)

ATTENTION = """
[bold]Examples[/bold]
  pagetile bench attention --query-len 2048 --causal
  pagetile bench attention --num-heads 32 --num-kv-heads 8 --dtype bfloat16
"""
SCORES = """
[bold]Examples[/bold]
  pagetile bench scores --iterations 100 --warmup 10
  pagetile bench scores --batch 343 --num-heads 3 --num-tokens 343 --head-size 16
"""
WINDOWS = """
[bold]Examples[/bold]
  pagetile bench windows --iterations 100 --warmup 10
  pagetile bench windows --grid 56,56 --window 7,7 --head-size 32 --backward
"""

Iterations = Annotated[int, option(None, "N", "Timed calls of each implementation.", min=1)]
Warmup = Annotated[int, option(None, "N", "Untimed calls of each before that.", min=0)]
Device = Annotated[
    Literal["cpu", "cuda"] | None,
    option(None, "NAME", "cpu or cuda. Without it, a GPU if there is one."),
]
NumHeads = Annotated[int, option(None, "N", "Heads of queries.")]
HeadSize = Annotated[int, option(None, "N", "Width of a head.")]


bench.callback(invoke_without_command=True)(show_help)


@bench.command(epilog=ATTENTION)
def attention(
    batch: Annotated[int, option(None, "N", "Sequences.")] = 1,
    query_len: Annotated[int, option(None, "N", "Queries of a sequence.")] = 1024,
    key_len: Annotated[
        int | None, option(None, "N", "Keys of a sequence; without it, as many as queries.")
    ] = None,
    num_heads: NumHeads = 8,
    num_kv_heads: Annotated[
        int | None,
        option(None, "N", "Heads of keys and values; without it, as many as of queries."),
    ] = None,
    head_size: HeadSize = 64,
    causal: Causal = False,
    sliding_window: SlidingWindow = None,
    dtype: Element = "float32",
    device: Device = None,
    iterations: Iterations = 100,
    warmup: Warmup = 10,
) -> None:
    """Tiled attention."""
    from ..analysis.attention_io import AttentionShape

    where = _find_device(device)
    element = _element(dtype)
    shape = AttentionShape(
        query_len,
        head_size,
        key_len=query_len if key_len is None else key_len,
        num_heads=num_heads,
        num_kv_heads=num_heads if num_kv_heads is None else num_kv_heads,
        batch=batch,
        causal=causal,
        sliding_window=sliding_window,
        element_bytes=element.itemsize,
    )
    from ..analysis.contests import attention_contest

    _check_memory(shape.batch * shape.num_heads * shape.query_len * shape.key_len, where)
    _run(lambda: attention_contest(shape, dtype=element, device=where), iterations, warmup)


@bench.command(epilog=SCORES)
def scores(
    batch: Annotated[int, option(None, "N", "Windows, or sequences.")] = 2,
    num_heads: NumHeads = 12,
    num_tokens: Annotated[int, option(None, "N", "Queries, and as many keys.", min=1)] = 196,
    head_size: HeadSize = 64,
    dtype: Element = "float32",
    device: Device = None,
    iterations: Iterations = 100,
    warmup: Warmup = 10,
) -> None:
    """Products of queries and keys."""
    from ..analysis.attention_io import AttentionShape

    where = _find_device(device)
    shape = AttentionShape(num_tokens, head_size, num_heads=num_heads, batch=batch)
    from ..analysis.contests import scores_contest

    sizes = (shape.batch, shape.num_heads, shape.query_len, shape.head_size)
    _check_memory(shape.batch * shape.num_heads * shape.query_len**2, where)
    element = _element(dtype)
    _run(lambda: scores_contest(*sizes, dtype=element, device=where), iterations, warmup)


@bench.command(epilog=WINDOWS)
def windows(
    grid: Annotated[str, option(None, "LIST", "Size of the map along each axis.")] = "14,14,14",
    window: Annotated[str, option(None, "LIST", "Tokens of a window.")] = "7,7,7",
    shift: Annotated[
        str | None, option(None, "LIST", "Of the windows; without it, half of them; 0,0 is none.")
    ] = None,
    num_images: Annotated[int, option(None, "N", "Maps at once.")] = 1,
    num_heads: NumHeads = 3,
    head_size: HeadSize = 16,
    backward: Annotated[
        bool, flag(None, "--backward", "Compute the gradients of q, k, v and the bias as well.")
    ] = False,
    dtype: Element = "float32",
    device: Device = None,
    iterations: Iterations = 100,
    warmup: Warmup = 10,
) -> None:
    """Window attention with a bias table and a shift mask."""
    from ..analysis.window_grid import WindowGrid

    where = _find_device(device)
    cut = WindowGrid.of(*parse_grid(grid, window, shift))
    shape = cut.shape(num_images=num_images, num_heads=num_heads, head_size=head_size)
    _check_memory(shape.num_scores, where)
    from ..analysis.window_contest import windows_contest

    element = _element(dtype)

    def make() -> Contest:
        return windows_contest(
            cut,
            num_images=num_images,
            num_heads=num_heads,
            head_size=head_size,
            dtype=element,
            device=where,
            backward=backward,
        )

    _run(make, iterations, warmup)


def _find_device(device: str | None) -> torch.device:
    import torch

    from ..device import default_device

    if device is None:
        return default_device()
    if device == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError("--device cuda: this PyTorch finds no GPU")
    return torch.device(device)


_SCORE_BYTES = 2 * 8  # of the definition's, in float64: they are exponentiated


def _check_memory(num_scores: int, device: torch.device) -> None:
    """Refuse what does not fit: eager code stores all scores."""
    from ..device import available_memory

    needed, free = num_scores * _SCORE_BYTES, available_memory(device)
    if needed > free:
        raise RequestError(
            f"{num_scores:,} scores, which the float64 reference and eager code store, take "
            f"{needed:,} bytes and more, and {free:,} are free: take fewer or shorter sequences"
        )


def _element(dtype: str) -> torch.dtype:
    import torch

    element: torch.dtype = getattr(torch, dtype)
    return element


def _run(make: Callable[[], Contest], iterations: int, warmup: int) -> None:
    from tqdm import tqdm

    from ..analysis.measure import measure_machine
    from ..analysis.side_by_side import compare

    status = Console(stderr=True, highlight=False)
    with status.status("Computing in float64"):
        contest = make()
    with status.status("Measuring this machine"):
        machine = measure_machine(contest.expected[0].device)
    rounds = iterations + warmup
    with tqdm(
        total=rounds, desc="Timing", unit="round", leave=False, disable=not status.is_terminal
    ) as bar:
        results = compare(contest, iterations=iterations, warmup=warmup, tick=bar.update)
    roofs = contest.work.on(machine)
    console = wide_console()
    console.print(f"[bold]{contest.title}[/bold]\n{machine.title}\n")
    shortest = min((result.times.median for result in results if result.times), default=1.0)
    unit = "µs" if shortest < 1e-3 else "ms"
    console.print(_table(results, roofs, unit))
    console.print()
    console.print(aligned(_floor_rows(roofs, unit)))
    for note in contest.notes:
        console.print(f"[dim]{note}[/dim]")
    for result in results:
        if result.reason:
            console.print(f"[dim]{result.name} is left out: {result.reason}[/dim]")


def _table(results: list[Result], roofs: Roofs, unit: str) -> Table:
    from ..analysis.timing import ratio

    table = make_table("", f"median, {unit}", "p10 to p90", "x own", "of least", "error")
    own = results[0].times
    for result in results:
        times = result.times
        if times is None:
            continue
        table.add_row(
            result.name,
            _in(unit, times.median),
            " to ".join(_in(unit, times.quantile(share)) for share in (0.1, 0.9)),
            f"{ratio(times, own):.2f} x" if own else "",
            f"{_digits(times.median / roofs.seconds)} x",
            f"{result.error:.1e}",
        )
    return table


def _floor_rows(roofs: Roofs, unit: str) -> dict[str, str]:
    names = {"bytes": roofs.bytes, "products": roofs.products, "exponentials": roofs.exps}
    return {
        "x own": "time divided by pagetile's; below 1 is faster than pagetile",
        "least time": f"{_in(unit, roofs.seconds)} {unit}: "
        + ", ".join(f"{name} {_in(unit, seconds)}" for name, seconds in names.items()),
        "of least": "time divided by the least time, the largest of these three",
        "error": "largest difference from float64, divided by the largest value",
    }


def _in(unit: str, seconds: float) -> str:
    return _digits(seconds * {"µs": 1e6, "ms": 1e3}[unit])


def _digits(value: float) -> str:
    """Format a number with three digits, or all before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
