"""Measures this machine's bandwidth, product rate and exponential rate in a few seconds."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from ..device import DeviceInfo
from ..shapes import dtype_name
from .roofline import Machine, machine, machine_names
from .timing import clock_of, take_turns

REPEATS = 7


def measure_machine(device: torch.device | str = "cpu", *, scale: float = 1.0) -> Machine:
    """Read bandwidth by a sum, product rate by a square product, rate of exponentials.

    On a CPU exponentials are the kernels' own, over numbers that stay in cache (torch's take ten
    times as long). No library call shows a GPU's: its unit computes 16 a clock and multiprocessor,
    which the table knows for the GPUs in it; for others they stay unmeasured, and infinite.

    Args:
        device: Whose; a tensor's device.
        scale: Sizes the tensors; below 1 is quicker and less exact.

    Examples:
        >>> here = measure_machine(scale=0.01)
        >>> here.bytes_per_second > 1e8 and here.flops["float32"] > 1e8
        True
    """
    device = torch.device(device)
    info = DeviceInfo.of(device)
    on_gpu = device.type == "cuda"
    dtypes = [torch.float32, torch.bfloat16] + ([torch.float16] if on_gpu else [])
    sizes = (2**30, 8192) if on_gpu else (2**27, 2048)
    big = torch.ones(max(2**10, int(sizes[0] * scale)), device=device)
    read = _least_seconds(big.sum, device)
    most = max(64, int(sizes[1] * scale ** (1 / 3)))
    sides = {dtype: _find_side(most, dtype, device) for dtype in dtypes}
    flops = {dtype_name(t): _product_rate(sides[t], t, device) for t in dtypes}
    widest = max(sides.values())
    flops.setdefault("float16", flops["float32"])  # as which a CPU multiplies it
    return Machine(
        name="here",
        title=info.name or device.type,
        bytes_per_second=big.numel() * 4 / read,
        flops=flops,
        exps_per_second=_known_exps(info.name) if on_gpu else _exp_rate(device),
        source=f"measured: sum of {big.numel() * 4 / 2**20:.0f} MiB, products of side {widest}",
    )


def _least_seconds(call: Callable[[], object], device: torch.device) -> float:
    """The best of some calls: what is measured here is to be a bound for others."""
    calls = {"call": call}
    return take_turns(calls, repeats=REPEATS, warmup=1, clock=clock_of(device))["call"].best


def _find_side(most: int, dtype: torch.dtype, device: torch.device) -> int:
    """The side of a square product that takes some hundredths of a second.

    A CPU without instructions for bfloat16 takes minutes for products of side 2048.
    """
    if device.type != "cpu":
        return most
    side = min(most, 128)
    while side < most:
        a = torch.ones(side, side, dtype=dtype)
        torch.mm(a, a)  # the first one takes memory and starts threads
        start = time.perf_counter()
        torch.mm(a, a)
        if time.perf_counter() - start > 0.005:
            break
        side = min(2 * side, most)
    return side


def _product_rate(side: int, dtype: torch.dtype, device: torch.device) -> float:
    a = torch.ones(side, side, dtype=dtype, device=device)
    return float(2 * side**3 / _least_seconds(lambda: a @ a, device))


def _exp_rate(device: torch.device) -> float:
    from .exponentials import raise_two

    # On one thread, whose rate all are taken to have: waiting for each other would take longer.
    x = torch.linspace(-8, 0, 2**11).numpy()
    into, repeats = x.copy(), 256
    seconds = _least_seconds(lambda: raise_two(into, x, repeats), device)
    return torch.get_num_threads() * repeats * len(x) / seconds


def _known_exps(name: str) -> float:
    joined = name.replace(" ", "").lower()
    rates = (machine(known).exps_per_second for known in machine_names() if known in joined)
    return next(rates, float("inf"))
