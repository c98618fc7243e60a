"""``pagetile explain``: pictures of pages, tiles, bytes and windows, with their numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table

from ..errors import RequestError
from .options import Causal, Element, SlidingWindow, option, parse_grid, parse_sizes, show_help
from .output import aligned, make_table

if TYPE_CHECKING:
    from ..analysis.io_curves import IoCurves
    from ..analysis.roofline import Machine, Work
    from ..analysis.tile_walk import TileWalk
    from ..analysis.window_grid import WindowGrid
    from ..analysis.window_io import WindowShape

explain = typer.Typer(help="Draw how attention is computed, and count what it moves.")

TILES = """
[bold]Examples[/bold]
  pagetile explain tiles --query-len 300 --tile 64,64 --causal
  pagetile explain tiles --query-len 1024 --sliding-window 256 --causal
"""
IO = """
[bold]Examples[/bold]
  pagetile explain io --head-size 64 --tiles 32,64,128
  pagetile explain io --lengths 256,65536 --causal --machine a100 --out io.svg
  pagetile explain io --head-size 192 --v-head-size 128 --group 8 --outer kv
"""
WINDOWS = """
[bold]Examples[/bold]
  pagetile explain windows --grid 14,14 --window 7,7 --shift 3,3
  pagetile explain windows --grid 48,48,48 --window 7,7,7 --shift 3,3,3 --num-heads 3 \\
      --head-size 16 --machine h200
"""


PAGES = """
[bold]Examples[/bold]
  pagetile explain pages
  pagetile explain pages --animation life.svg
"""


Out = Annotated[Path, option(None, "FILE", "File of the picture, .png or .svg.")]
MachineName = Annotated[
    str | None,
    option(
        None,
        "NAME",
        "Add the least possible times on a GPU: h200, h200-measured, h100, a100, rtx4090, "
        "rtx4060ti; or here, for this machine (measured first).",
    ),
]


explain.callback(invoke_without_command=True)(show_help)


@explain.command(epilog=PAGES)
def pages(
    animation: Annotated[
        Path | None, option(None, "FILE", "Also write all steps as an animated SVG.")
    ] = None,
    out: Out = Path("pages.png"),
) -> None:
    """Draw block tables over a pool: sharing, copy-on-write, and the slots that are wasted.

    The steps are played with the real block pool, tables and prefix index.
    """
    from ..analysis.page_story import page_story
    from ..analysis.pictures import animate_pages, check_path, draw_pages, save

    check_path(out)
    steps = page_story()
    shown = next(step for step in steps if step.copy is not None)
    rows = {"picture": str(out)}
    if animation is not None:
        animate_pages(steps, check_path(animation))
        rows["animation"] = str(animation)
    save(draw_pages(shown.pages, shown.copy), out)
    console = Console(highlight=False)
    for number, step in enumerate(steps, 1):
        console.print(f"{number:2}  {step.caption}")
    console.print(f"\nAfter step {steps.index(shown) + 1}, which the picture shows:\n")
    console.print(shown.pages)
    console.print()
    console.print(aligned(rows))


@explain.command(epilog=TILES)
def tiles(
    query_len: Annotated[int, option(None, "N", "Queries.")] = 300,
    key_len: Annotated[
        int | None,
        option(
            None,
            "N",
            "Keys; without it, as many as queries. The last query stands at the last key.",
        ),
    ] = None,
    tile: Annotated[str, option(None, "M,N", "Queries and keys in a tile.")] = "64,64",
    causal: Causal = False,
    sliding_window: SlidingWindow = None,
    query_tile: Annotated[
        int | None,
        option(None, "I", "Index of the query tile to highlight. Without it, the middle one."),
    ] = None,
    out: Out = Path("tiles.png"),
) -> None:
    """Draw which K/V tiles each query tile visits, which it masks, which it skips."""
    from ..analysis.pictures import check_path, draw_tiles, save
    from ..analysis.tile_walk import TileWalk

    check_path(out)
    tile_m, tile_n = parse_sizes(tile, "--tile", count=2)
    length = query_len if key_len is None else key_len
    walk = TileWalk(query_len, length, tile_m, tile_n, causal, sliding_window)
    save(draw_tiles(walk, query_tile), out)
    chosen = walk.num_query_tiles // 2 if query_tile is None else query_tile
    _print({**_walk_rows(walk, chosen), "picture": str(out)})


@explain.command(epilog=IO)
def io(
    head_size: Annotated[int, option(None, "N", "Width of a head of keys and values.")] = 128,
    tiles: Annotated[
        str, option(None, "LIST", "Query tile sizes to compare, in rows.")
    ] = "48,64,128,256",
    tile_n: Annotated[int, option(None, "N", "Keys in a K/V tile.")] = 64,
    lengths: Annotated[str, option(None, "A,B", "Shortest and longest sequence.")] = "64,16384",
    causal: Causal = False,
    dtype: Element = "bfloat16",
    v_head_size: Annotated[
        int | None, option(None, "N", "Width of a head of values, if it differs.", min=1)
    ] = None,
    group: Annotated[int, option(None, "N", "Query heads for each KV head (GQA).", min=1)] = 1,
    outer: Annotated[
        Literal["q", "kv"],
        option(
            None,
            "q|kv",
            "Outer loop: tiles of q stay on chip while K/V tiles pass, or the reverse.",
        ),
    ] = "q",
    num_heads: Annotated[
        int, option(None, "N", "Query heads, for the least times of --machine.")
    ] = 16,
    machine: MachineName = None,
    out: Out = Path("io.png"),
) -> None:
    """Plot the bytes of attention against its length for several tiles, crossovers marked."""
    from ..analysis.attention_io import AttentionShape
    from ..analysis.checkpoint import ELEMENT_BYTES
    from ..analysis.io_curves import io_curves
    from ..analysis.pictures import check_path, draw_io, save
    from ..analysis.roofline import attention_work

    check_path(out)
    shortest, longest = parse_sizes(lengths, "--lengths", count=2)
    element_bytes = ELEMENT_BYTES[dtype]
    known = None if machine is None else _find_machine(machine)
    on_chip = {"on_chip_bytes": known.program_bytes} if known and known.program_bytes else {}
    curves = io_curves(
        head_size=head_size,
        tiles_m=parse_sizes(tiles, "--tiles"),
        tile_n=tile_n,
        shortest=shortest,
        longest=longest,
        causal=causal,
        element_bytes=element_bytes,
        v_head_size=v_head_size,
        group=group,
        outer=outer,
        **on_chip,
    )
    chip = "chip" if on_chip else "a Hopper GPU's chip"
    rows = {"resident": f"K and V of a head fit on {chip} up to {curves.longest_resident:,} keys"}
    shape = AttentionShape(
        longest, head_size, v_head_size=v_head_size or head_size, num_heads=num_heads,
        causal=causal, element_bytes=element_bytes,
    )  # fmt: skip
    if known is not None:
        if num_heads % group:
            raise RequestError(f"--num-heads {num_heads}: expected a multiple of --group {group}")
        work = attention_work(replace(shape, num_kv_heads=num_heads // group), dtype=dtype)
        rows |= {"heads": f"{num_heads}", **_roof_rows(work, known)}
    save(draw_io(curves), out)
    console = Console(highlight=False)
    console.print(f"[bold]{curves.title}[/bold]\n\nOne KV head of {longest:,} queries and keys:\n")
    console.print(_io_table(curves))
    console.print()
    console.print(aligned({**rows, "picture": str(out)}))


@explain.command(epilog=WINDOWS)
def windows(
    grid: Annotated[
        str, option(None, "LIST", "Size of the feature map, two or three axes.")
    ] = "14,14",
    window: Annotated[str, option(None, "LIST", "Size of a window along each axis.")] = "7,7",
    shift: Annotated[
        str | None,
        option(None, "LIST", "Shift along each axis. Without it, half a window, as in Swin."),
    ] = None,
    num_heads: Annotated[
        int, option(None, "N", "Heads of the attention call whose bytes are counted.")
    ] = 3,
    head_size: Annotated[int, option(None, "N", "Width of a head in that call.")] = 32,
    num_images: Annotated[int, option(None, "N", "Feature maps in that call.")] = 1,
    dtype: Element = "bfloat16",
    machine: MachineName = None,
    out: Out = Path("windows.png"),
) -> None:
    """Draw the regions of a map whose windows are shifted, and count one attention call.

    A map of three axes is drawn in slices.
    """
    from ..analysis.checkpoint import ELEMENT_BYTES
    from ..analysis.pictures import check_path, draw_windows, save
    from ..analysis.roofline import window_work
    from ..analysis.window_grid import WindowGrid

    check_path(out)
    cut = WindowGrid.of(*parse_grid(grid, window, shift))
    known = None if machine is None else _find_machine(machine)
    shape = cut.shape(
        num_images=num_images,
        num_heads=num_heads,
        head_size=head_size,
        element_bytes=ELEMENT_BYTES[dtype],
    )
    rows = _grid_rows(cut) | _byte_rows(shape)
    if known is not None:
        rows |= _roof_rows(window_work(shape, dtype=dtype), known)
    save(draw_windows(cut), out)
    _print({**rows, "picture": str(out)})


def _print(rows: dict[str, str]) -> None:
    Console(highlight=False).print(aligned(rows))


def _walk_rows(walk: TileWalk, query_tile: int) -> dict[str, str]:
    counts, visits, rows = walk.counts, walk.visits(query_tile), walk.rows(query_tile)
    kinds = ", ".join(f"{counts[kind]:,} {kind}" for kind in ("full", "masked", "skipped"))
    seen, computed, read = walk.num_visible, walk.num_computed, walk.num_key_rows
    walked = f"K/V tiles {visits.start} to {visits.stop - 1}" if visits else "no K/V tile"
    return {
        "tiles": f"{counts.total():,}: {kinds}",
        "scores": f"{seen:,} count, of {computed:,} computed"
        + (f" ({seen / computed:.1%})" if computed else ""),
        "K and V": f"{read:,} rows of each are read, {read / walk.key_len:.2f} times all there are",
        f"query tile {query_tile}": f"rows {rows.start} to {rows.stop - 1} visit {walked}",
    }


def _io_table(curves: IoCurves) -> Table:
    from ..analysis.traffic import format_count

    table = make_table("", "bytes", "standard's are", "on chip", "more than standard")
    base = curves.standard.bytes[-1]
    for curve in (curves.standard, *curves.tiled, curves.compulsory):
        table.add_row(
            curve.name,
            format_count(curve.bytes[-1]),
            f"{base / curve.bytes[-1]:.2f} x",
            format_count(curve.on_chip_bytes) if curve.tile_m else "",
            curves.where_worse(curve) if curve.tile_m else "",
        )
    return table


def _grid_rows(grid: WindowGrid) -> dict[str, str]:
    def times(sizes: tuple[int, ...]) -> str:
        return " x ".join(map(str, sizes))

    rows = {
        "map": f"{times(grid.size)} in {times(grid.windows)} windows of {times(grid.window)}",
        "shift": times(grid.shift) if any(grid.shift) else "none",
    }
    if grid.num_padding:
        rows["padding"] = f"{grid.num_padding:,} tokens, to {times(grid.padded)}"
    if any(grid.shift):
        share = grid.num_masked / grid.num_windows
        rows["masked"] = f"{grid.num_masked:,} of {grid.num_windows:,} windows ({share:.0%})"
    return rows


def _byte_rows(shape: WindowShape) -> dict[str, str]:
    from ..analysis.traffic import format_count
    from ..analysis.window_io import compulsory, unfused

    rows = {
        "attention": f"{shape.num_windows:,} windows x {shape.num_heads} heads x "
        f"{shape.num_tokens} tokens x {shape.head_size}",
    }
    if shape.num_region_windows:
        rows["mask"] = (
            f"{format_count(shape.dense_mask_bytes)} dense, "
            f"{format_count(shape.region_bytes)} as region ids"
        )
    rows["scores"] = f"{format_count(shape.score_matrix_bytes)} in float32"
    fused, eager = compulsory(shape).bytes, unfused(shape, how="half").bytes
    rows["moved"] = (
        f"{format_count(fused)} at least, {format_count(eager)} unfused ({eager / fused:.1f} x)"
    )
    return rows


def _find_machine(name: str) -> Machine:
    from ..analysis.roofline import machine, machine_names

    if name in machine_names():
        return machine(name)
    if name != "here":
        known = ", ".join(("here", *machine_names()))
        raise RequestError(f"--machine {name}: expected one of {known}")
    import torch

    from ..analysis.measure import measure_machine

    device = "cuda" if torch.cuda.is_available() else "cpu"
    with Console(stderr=True, highlight=False).status("Measuring this machine"):
        return measure_machine(device)


def _roof_rows(work: Work, machine: Machine) -> dict[str, str]:
    roofs = work.on(machine)
    names = {"bytes": "bytes", "products": "products", "exps": "exponentials"}
    times = ", ".join(f"{label} {_time(getattr(roofs, name))}" for name, label in names.items())
    return {"least time": f"{_time(roofs.seconds)} on {machine.title}", "of which": times}


def _time(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:,.0f} s" if seconds >= 100 else f"{seconds:.3g} s"
    return f"{seconds * 1e6:.3g} µs" if seconds < 1e-3 else f"{seconds * 1e3:.3g} ms"
