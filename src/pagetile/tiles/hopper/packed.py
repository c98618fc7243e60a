"""Convert packed 8-bit values, four per register, exactly to float16 or bfloat16."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

SIGNS = gl.constexpr(-0x7F7F7F80)  # the signs of a word's four values, as an int32

# Even columns (bytes 0 and 2 of a register) and odd columns (bytes 1 and 3) to a register each.
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

# Neighbours (bytes 0 and 1, and bytes 2 and 3) to a register each.
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
    """Convert int16 pairs of 8-bit values to float16: the first and the second pair of columns.

    For rows in memory order: a thread's two pairs are four neighbouring columns of a row.
    """
    asm: gl.constexpr = (
        _E4M3_WIDE if FORMAT == "e4m3" else _E5M2_WIDE if FORMAT == "e5m2" else _INT8_WIDE
    )
    return _convert(pairs, asm)


@gluon.jit
def split_packed(pairs, FORMAT: gl.constexpr):
    """Convert int16 pairs of 8-bit values to float16: the even and the odd columns."""
    asm: gl.constexpr = _E4M3 if FORMAT == "e4m3" else _E5M2 if FORMAT == "e5m2" else _INT8
    return _convert(pairs, asm)


# Words of four values in $2 to pairs of float16 in p and q. SIGNS, $3 or 0, has the sign bits to
# flip. int8 takes the upper bytes of its pairs from the offset: the warps that convert have 32
# registers a thread, and a register for these bytes would be spilled.
_TO_F16 = {
    "e4m3": """
        .reg .b16 h, i;
        xor.b32 w, $2, SIGNS; mov.b32 {h, i}, w;
        cvt.rn.f16x2.e4m3x2 p, h; cvt.rn.f16x2.e4m3x2 q, i;
    """,
    "e5m2": """
        xor.b32 w, $2, SIGNS;
        prmt.b32 p, w, 0, 0x1404; prmt.b32 q, w, 0, 0x3424;
    """,
    "int8": """
        .reg .b32 offset;
        and.b32 offset, SIGNS, 0x80008000; xor.b32 offset, offset, 0x64806480;
        xor.b32 w, $2, 0x80808080;
        prmt.b32 p, w, offset, 0x5150; sub.f16x2 p, p, offset;
        prmt.b32 q, w, offset, 0x5352; sub.f16x2 q, q, offset;
    """,
}
# An int8 is its low seven bits minus 128 if the sign bit is set. 0x4300 | low is the bfloat16
# 128 + low, and 0x4300 | sign is 128 or 256: subtract the two.
_INT8_TO_BF16 = """{
    .reg .b32 p, q, s, bias;
    xor.b32 bias, $3, 0x43434343;
    prmt.b32 p, $2, bias, 0x4140; prmt.b32 q, $2, bias, 0x4342;
    and.b32 s, p, 0xff80ff80; and.b32 p, p, 0xff7fff7f; sub.rn.bf16x2 $0, p, s;
    and.b32 s, q, 0xff80ff80; and.b32 q, q, 0xff7fff7f; sub.rn.bf16x2 $1, q, s;
}"""


def _by_float32(form: str, kind: str, signs: str, factor: str = "") -> str:
    """PTX that converts words to pairs of ``kind`` through float32, multiplied by ``factor``."""
    body = "{ .reg .b32 w, p, q; .reg .b16 a, b; .reg .f32 e, f;"
    body += _TO_F16[form].replace("SIGNS", signs)
    for pair, out in (("p", "$0"), ("q", "$1")):
        body += f"mov.b32 {{a, b}}, {pair}; cvt.f32.f16 e, a; cvt.f32.f16 f, b;"
        if factor:
            body += f"mul.f32 e, e, {factor}; mul.f32 f, f, {factor};"
        body += f"cvt.rn.{kind}x2.f32 {out}, f, e;"
    return body + "}"


_WIDENED = gl.constexpr(
    {
        **{
            f"{form} f16": "{ .reg .b32 w, p, q;"
            + body.replace("SIGNS", "$3")
            + "mov.b32 $0, p; mov.b32 $1, q; }"
            for form, body in _TO_F16.items()
        },
        **{f"{form} bf16": _by_float32(form, "bf16", "$3") for form in ("e4m3", "e5m2")},
        "int8 bf16": _INT8_TO_BF16,
    }
)
_SCALED = gl.constexpr(
    {
        f"{form} {kind}": _by_float32(form, kind, "0", "$3")
        for form in _TO_F16
        for kind in ("f16", "bf16")
    }
)


@gluon.constexpr_function
def _widened(form, is_bf16):
    return _WIDENED.value[f"{form} bf16" if is_bf16 else f"{form} f16"]


@gluon.constexpr_function
def _scaled(form, is_bf16):
    return _SCALED.value[f"{form} bf16" if is_bf16 else f"{form} f16"]


@gluon.jit
def scale_words(words, scale, FORMAT: gl.constexpr, dtype: gl.constexpr):
    """Like ``widen_words``, times float32 scales, which broadcast; rounded to ``dtype``."""
    asm: gl.constexpr = _scaled(FORMAT, dtype == gl.bfloat16)
    first, second = gl.inline_asm_elementwise(
        asm, "=&r,=&r,r,f", [words, scale], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    return gl.reshape(gl.join(first, second), [words.shape[0], 2 * words.shape[1]])


@gluon.jit
def widen_words(words, signs, FORMAT: gl.constexpr, dtype: gl.constexpr):
    """Convert int32 words of four 8-bit values to float16 or bfloat16, in memory order.

    Returns int32 pairs of 16-bit elements, in twice as many columns as ``words``. Where ``signs``
    is ``SIGNS`` instead of 0, values are negated. Infinities and NaN are kept.
    """
    asm: gl.constexpr = _widened(FORMAT, dtype == gl.bfloat16)
    first, second = gl.inline_asm_elementwise(
        asm, "=r,=r,r,r", [words, signs], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    return gl.reshape(gl.join(first, second), [words.shape[0], 2 * words.shape[1]])
