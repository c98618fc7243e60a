"""Packed 8-bit values, converted exactly to float16, four in a register."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# A register holds four 8-bit values: bytes 0 and 2 are even columns, 1 and 3 odd ones.
_E4M3 = gl.constexpr("""{
    .reg .b32 t; .reg .b16 h;
    prmt.b32 t, $2, 0, 0x4420; cvt.u16.u32 h, t; cvt.rn.f16x2.e4m3x2 $0, h;
    prmt.b32 t, $2, 0, 0x4431; cvt.u16.u32 h, t; cvt.rn.f16x2.e4m3x2 $1, h;
}""")
# e5m2 is the upper half of a float16.
_E5M2 = gl.constexpr("""{
    .reg .b32 t;
    shl.b32 t, $2, 8; and.b32 $0, t, 0xff00ff00;
    and.b32 $1, $2, 0xff00ff00;
}""")
# 0x6400 | u is the float16 1024 + u, and u = value + 128: subtract 1152.
_INT8 = gl.constexpr("""{
    .reg .b32 t, u, bias, offset;
    mov.b32 bias, 0x64646464; mov.b32 offset, 0x64806480;
    xor.b32 t, $2, 0x80808080;
    prmt.b32 u, t, bias, 0x4240; sub.f16x2 $0, u, offset;
    prmt.b32 u, t, bias, 0x4341; sub.f16x2 $1, u, offset;
}""")

# The same for neighbours: bytes 0 and 1, and 2 and 3.
_E4M3_WIDE = gl.constexpr("""{
    .reg .b16 h, i;
    mov.b32 {h, i}, $2; cvt.rn.f16x2.e4m3x2 $0, h; cvt.rn.f16x2.e4m3x2 $1, i;
}""")
_E5M2_WIDE = gl.constexpr("""{
    prmt.b32 $0, $2, 0, 0x1404; prmt.b32 $1, $2, 0, 0x3424;
}""")
_INT8_WIDE = gl.constexpr("""{
    .reg .b32 t, u, bias, offset;
    mov.b32 bias, 0x64646464; mov.b32 offset, 0x64806480;
    xor.b32 t, $2, 0x80808080;
    prmt.b32 u, t, bias, 0x4140; sub.f16x2 $0, u, offset;
    prmt.b32 u, t, bias, 0x4342; sub.f16x2 $1, u, offset;
}""")


@gluon.jit
def _convert(pairs, asm: gl.constexpr):
    return gl.inline_asm_elementwise(
        asm, "=r,=r,r", [pairs], dtype=(gl.float16, gl.float16), is_pure=True, pack=2
    )


@gluon.jit
def widen_packed(pairs, FORMAT: gl.constexpr):
    """From int16 pairs of 8-bit values to float16, of the first and the second pair of columns.

    For rows in memory order: a thread's two pairs are four neighbouring columns of one row.
    """
    asm: gl.constexpr = (
        _E4M3_WIDE if FORMAT == "e4m3" else _E5M2_WIDE if FORMAT == "e5m2" else _INT8_WIDE
    )
    return _convert(pairs, asm)


@gluon.jit
def split_packed(pairs, FORMAT: gl.constexpr):
    """From int16 pairs of 8-bit values to float16, of the even and of the odd columns."""
    asm: gl.constexpr = _E4M3 if FORMAT == "e4m3" else _E5M2 if FORMAT == "e5m2" else _INT8
    return _convert(pairs, asm)
