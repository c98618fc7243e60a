"""Stage rows of a matrix product in shared memory, and store them contiguously at any alignment.

Global memory is written in lines of 128 bytes, and a row of 343 float16 elements may begin anywhere
in one: a warp that stores a part of a row would write two partial lines. So consecutive rows are
staged in shared memory with the same layout as in global memory, and stored in one piece. Triton
has no addresses of shared memory, hence the PTX. A launcher's ``more_shared`` reserves the bytes,
after those that Triton uses.

In a tensor core's result a thread holds pairs of neighbouring columns; the next pair of its row is
``2 T`` columns further, since ``T`` threads share a row (4 in a warp, times the warps side by
side). If columns are computed in ``column_order``, four pairs of a thread are eight neighbours of
the row, which ``split_eights`` takes from registers without data movement and ``store_eights``
stores (``T = 4``)::

    column of the product   0 1 2 3  4  5  6  7 | 8 9 10 11 …
    thread                  0 0 1 1  2  2  3  3 | 0 0  1  1
    place in the row        0 1 8 9 16 17 24 25 | 2 3 10 11 …

``T`` may also be a multiple of the threads that share a row: the pair ``2 T`` columns further is
still the same thread's. With any other layout Triton converts, with the same result. If rows are a
multiple of 16 bytes, groups of eight are aligned and stored as vectors.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def staging_address(size):
    """The address, a multiple of 128, of the last ``size`` bytes of a program's shared memory."""
    return tl.inline_asm_elementwise(
        """{ .reg .b32 all; mov.u32 $0, global_smem; mov.u32 all, %dynamic_smem_size;
        add.u32 $0, $0, all; sub.u32 $0, $0, $1; and.b32 $0, $0, -128; }""",
        "=&r,r", [size - 127], tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def column_order(COLUMNS: tl.constexpr, T: tl.constexpr):
    """The column of the row that each column of the product computes: ``[COLUMNS]``."""
    column = tl.arange(0, COLUMNS)
    thread, pair = column % (2 * T) // 2, column % (8 * T) // (2 * T)
    return column // (8 * T) * (8 * T) + thread * 8 + pair * 2 + column % 2


@triton.jit
def split_eights(x, T: tl.constexpr):
    """Split a product in ``column_order`` into eight tensors ``[rows, columns // (8 T), T]``.

    Tensor ``i`` holds element ``i`` of each group of eight neighbours, as integers; the group
    ``[:, g, t]`` begins at column ``8 T g + 8 t`` of the row.
    """
    ROWS: tl.constexpr = x.shape[0]
    GROUPS: tl.constexpr = x.shape[1] // (8 * T)
    BITS: tl.constexpr = x.dtype.primitive_bitwidth
    x = x.to(tl.int16 if BITS == 16 else tl.int32, bitcast=True)
    even, odd = tl.split(x.reshape([ROWS, GROUPS, 4, T, 2]))
    even = even.permute([0, 1, 3, 2]).reshape([ROWS, GROUPS, T, 2, 2])
    odd = odd.permute([0, 1, 3, 2]).reshape([ROWS, GROUPS, T, 2, 2])
    x04, x26 = tl.split(even)
    x15, x37 = tl.split(odd)
    x0, x4 = tl.split(x04)
    x1, x5 = tl.split(x15)
    x2, x6 = tl.split(x26)
    x3, x7 = tl.split(x37)
    return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def store_eights(at, x0, x1, x2, x3, x4, x5, x6, x7, IS_ALIGNED: tl.constexpr):
    """Store groups of eight at addresses ``at``, multiples of 16 bytes if ``IS_ALIGNED``."""
    BITS: tl.constexpr = x0.dtype.primitive_bitwidth
    tl.inline_asm_elementwise(
        _put(BITS, IS_ALIGNED),
        "=r,r,r,r,r,r,r,r,r,r" if BITS == 32 else "=r,r,h,h,h,h,h,h,h,h",
        [at, x0, x1, x2, x3, x4, x5, x6, x7], tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def store_some_eights(at, x0, x1, x2, x3, x4, x5, x6, x7, count, IS_ALIGNED: tl.constexpr):
    """Store the first ``count`` elements of each group, none if it is 0 or less.

    If ``IS_ALIGNED``, whole 16-byte vectors whose first element is below ``count``.
    """
    BITS: tl.constexpr = x0.dtype.primitive_bitwidth
    tl.inline_asm_elementwise(
        _put_some(BITS, IS_ALIGNED),
        "=r,r,r,r,r,r,r,r,r,r,r" if BITS == 32 else "=r,r,h,h,h,h,h,h,h,h,r",
        [at, x0, x1, x2, x3, x4, x5, x6, x7, count], tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


# 16-bit elements that begin in the middle of a word are stored as the three words between, and the
# first and the last alone.
_PUT_HALVES = tl.constexpr("""{
.reg .pred odd; .reg .b32 w<4>, v<3>, half, bytes, at;
and.b32 half, $1, 2; setp.ne.b32 odd, half, 0;
selp.b32 bytes, 0x5432, 0x3210, odd; add.u32 at, $1, half;
mov.b32 w0, {$2, $3}; mov.b32 w1, {$4, $5}; mov.b32 w2, {$6, $7}; mov.b32 w3, {$8, $9};
prmt.b32 v0, w0, w1, bytes; prmt.b32 v1, w1, w2, bytes; prmt.b32 v2, w2, w3, bytes;
@odd st.shared.b16 [$1], $2;
st.shared.b32 [at], v0; st.shared.b32 [at+4], v1; st.shared.b32 [at+8], v2;
@!odd st.shared.b32 [at+12], w3;
@odd st.shared.b16 [$1+14], $9;
mov.b32 $0, 0; }""")
_PUT_WORDS = tl.constexpr("""{
st.shared.b32 [$1], $2; st.shared.b32 [$1+4], $3;
st.shared.b32 [$1+8], $4; st.shared.b32 [$1+12], $5;
st.shared.b32 [$1+16], $6; st.shared.b32 [$1+20], $7;
st.shared.b32 [$1+24], $8; st.shared.b32 [$1+28], $9;
mov.b32 $0, 0; }""")
# Aligned groups are stored as 16-byte vectors, each only if its first element is below a count.
_PUT_VECTOR = tl.constexpr("""{ .reg .pred is_in; .reg .b32 w<4>;
mov.b32 w0, {$2, $3}; mov.b32 w1, {$4, $5}; mov.b32 w2, {$6, $7}; mov.b32 w3, {$8, $9};
setp.gt.s32 is_in, COUNT, 0; @is_in st.shared.v4.b32 [$1], {w0, w1, w2, w3};
mov.b32 $0, 0; }""")
_PUT_VECTORS = tl.constexpr("""{ .reg .pred is_in;
setp.gt.s32 is_in, COUNT, 0; @is_in st.shared.v4.b32 [$1], {$2, $3, $4, $5};
setp.gt.s32 is_in, COUNT, 4; @is_in st.shared.v4.b32 [$1+16], {$6, $7, $8, $9};
mov.b32 $0, 0; }""")


@triton.constexpr_function
def _put_vectors(bits, count):
    return (_PUT_VECTORS if bits == 32 else _PUT_VECTOR).value.replace("COUNT", count)


@triton.constexpr_function
def _put(bits, is_aligned):
    if is_aligned:
        return _put_vectors(bits, "8")
    return (_PUT_WORDS if bits == 32 else _PUT_HALVES).value


@triton.constexpr_function
def _put_some(bits, is_aligned):
    if is_aligned:
        return _put_vectors(bits, "$10")
    stores = (
        f"setp.gt.s32 is_in, $10, {i}; @is_in st.shared.b{bits} [$1+{i * bits // 8}], ${i + 2};"
        for i in range(8)
    )
    return "{ .reg .pred is_in; " + " ".join(stores) + " mov.b32 $0, 0; }"


@triton.jit
def copy_vectors(source, to, mask):
    """Copy 16 bytes each from shared to global memory."""
    tl.inline_asm_elementwise(
        """{ .reg .pred is_in; .reg .b32 x<4>; setp.ne.b32 is_in, $3, 0;
        @is_in ld.shared.v4.b32 {x0, x1, x2, x3}, [$1];
        @is_in st.global.v4.b32 [$2], {x0, x1, x2, x3}; mov.b32 $0, 0; }""",
        "=r,r,l,r", [source, to, mask.to(tl.int32)], tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def copy_numbers(source, to, mask, BITS: tl.constexpr):
    """Copy elements of ``BITS`` bits from shared to global memory."""
    tl.inline_asm_elementwise(
        _copy_numbers(BITS), "=r,r,l,r", [source, to, mask.to(tl.int32)], tl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@triton.constexpr_function
def _copy_numbers(bits):
    return (
        f"{{ .reg .pred is_in; .reg .b{bits} x; setp.ne.b32 is_in, $3, 0;"
        f" @is_in ld.shared.b{bits} x, [$1]; @is_in st.global.b{bits} [$2], x; mov.b32 $0, 0; }}"
    )


@triton.jit
def fence_staging(BULK: tl.constexpr):
    """Make staged data visible to all threads, and with ``BULK`` to the async proxy."""
    if BULK:
        tl.inline_asm_elementwise(
            "fence.proxy.async.shared::cta; mov.b32 $0, 0;",
            "=r,r", [tl.program_id(0)], tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    tl.debug_barrier()


@triton.jit
def bulk_store(source, to, size):
    """Copy ``size`` bytes from shared to global memory by a bulk copy; all multiples of 16."""
    tl.inline_asm_elementwise(
        """{ .reg .pred is_first; .reg .b32 thread; mov.u32 thread, %tid.x;
        setp.eq.u32 is_first, thread, 0;
        @is_first cp.async.bulk.global.shared::cta.bulk_group [$2], [$1], $3;
        mov.b32 $0, 0; }""",
        "=r,r,l,r", [source, to, size], tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def prefetch(at, size):
    """Prefetch ``size`` bytes to L2; all multiples of 16."""
    tl.inline_asm_elementwise(
        """{ .reg .pred is_first; .reg .b32 thread; mov.u32 thread, %tid.x;
        setp.eq.u32 is_first, thread, 0;
        @is_first cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0; }""",
        "=r,l,r", [at, size], tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def wait_bulk_stores():
    """Wait until bulk copies have read shared memory, which a program must before it ends."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0; mov.b32 $0, 0;",
        "=r,r", [tl.program_id(0)], tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
