"""Loops of products in machine code."""

import re

from numba import njit


def loops_of_products(function, signature, name="fmadd"):
    """The instructions of each innermost loop with multiply-adds, of this name."""
    kernel = njit(function)
    kernel.compile(signature)
    (code,) = kernel.inspect_asm().values()
    blocks = re.findall(r"^(\.LBB\w+):(.*?)(?=^\.LBB)", code, re.DOTALL | re.MULTILINE)
    return [
        body.partition(f"{label}\n")[0] for label, body in blocks
        if name in body and re.search(rf"\tj\w+\t{re.escape(label)}\n", body)
    ]  # fmt: skip


def spills(loop):
    """Instructions that store a vector on the stack, or load one from there."""
    return [line for line in loop.splitlines() if re.search("mm.*rsp", line)]
