"""Scores in float16, two to an instruction: what Triton does number by number, in PTX."""

import struct

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

__all__ = ["exp2_below", "exp2_less", "score_type", "tiles_ahead", "times"]


@gluon.constexpr_function
def score_type(dtype):
    """Of scores, their weights and what these change by: float16's are float16, as eager code's.

    The scale is then rounded, and a row's pivot multiplied by as much: weights are off by that
    part of their own exponent, not of the score.
    """
    return gl.float16 if dtype == gl.float16 else gl.float32


@gluon.constexpr_function
def tiles_ahead(dtype):
    """Tiles whose scores are under way at once: float16 takes half of the registers."""
    return 2 if dtype == gl.float16 else 1


def _exp2_of_pairs(polynomials: int, terms: int) -> str:
    """PTX of ``2 ** (factor · s + term)``, or of the sum of two terms, for four pairs.

    Where exponentials are what a kernel waits for, some pairs take a polynomial instead. There
    ``x = n + f``; adding 1551 leaves 15 + n in the last five bits, which is 2 ** n shifted by ten.
    From -15 on it is 0, and from 15.5 on inf.
    """
    halves = {"least": -15.0, "most": 16.0, "magic": 1551.0}
    halves |= {"c0": 1.0, "c1": 0.6933, "c2": 0.2426, "c3": 0.05518}
    lines = ["{ .reg .b32 x, n, f, y, low;", "mov.b32 low, 0x001f001f;"]
    for name, value in halves.items():
        bits = struct.pack(">e", value).hex()
        lines.append(f".reg .b32 {name}; mov.b32 {name}, 0x{bits}{bits};")
    for i in range(4):
        lines.append(f"fma.rn.f16x2 x, ${4 + i}, ${8 + i}, ${12 + i};")
        if terms == 2:
            lines.append(f"add.rn.f16x2 x, x, ${16 + i};")
        if i >= polynomials:
            lines.append(f"ex2.approx.f16x2 ${i}, x;")
            continue
        lines += [
            "max.NaN.f16x2 x, x, least;",
            "min.NaN.f16x2 x, x, most;",
            "add.rn.f16x2 n, x, magic;",
            "sub.rn.f16x2 f, n, magic;",
            "sub.rn.f16x2 f, x, f;",
            "fma.rn.f16x2 y, f, c3, c2;",
            "fma.rn.f16x2 y, y, f, c1;",
            "fma.rn.f16x2 y, y, f, c0;",
            "and.b32 n, n, low;",
            "shl.b32 n, n, 10;",
            f"mul.rn.f16x2 ${i}, y, n;",
        ]
    return " ".join([*lines, "}"])


EXP2_LESS = gl.constexpr(_exp2_of_pairs(polynomials=1, terms=1))
EXP2_BELOW = gl.constexpr(_exp2_of_pairs(polynomials=1, terms=2))


@gluon.jit
def exp2_less(s, factor, pivot):
    """2 ** (factor · s - pivot), inf from 2 ** 15.5 on; a quarter of them by polynomials."""
    return gl.inline_asm_elementwise(
        EXP2_LESS,
        "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r,r,r",
        [s, factor.to(gl.float16), (-pivot).to(gl.float16)],
        gl.float16,
        is_pure=True,
        pack=8,
    )


@gluon.jit
def exp2_below(s, factor, high, low):
    """2 ** (factor · s + high + low): a number in two, of which float16 loses nothing; as above."""
    return gl.inline_asm_elementwise(
        EXP2_BELOW,
        "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r",
        [s, factor.to(gl.float16), high, low],
        gl.float16,
        is_pure=True,
        pack=8,
    )


@gluon.jit
def times(a, b):
    """Products."""
    return gl.inline_asm_elementwise(
        "mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [a, b], gl.float16, is_pure=True, pack=2
    )
