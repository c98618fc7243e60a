"""Bytes of window attention (Swin): fused, and as the model libraries compute it.

``X`` is the number of elements of q (and of k, v and out), ``S`` that of the scores:
``windows x heads x tokens²``. A fused kernel holds a window's keys and values on chip, so only what
windows share is read more than once: the relative-position bias and the shift mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..errors import ShapeError
from .traffic import Stream, Traffic

FLOAT32 = 4

BiasForm = Literal["matrix", "table", "none"]
"""``[heads, tokens, tokens]``, ``[table, heads]``, or no bias."""


@dataclass(frozen=True)
class WindowShape:
    """One call of window attention.

    Examples:
        >>> shape = WindowShape(343, 3, 343, 16, num_region_windows=343, table_size=2197)
        >>> shape.num_scores, shape.tensor_bytes
        (121060821, 11294304)
        >>> round(compulsory(shape).bytes / 1e6, 1)
        45.3
    """

    num_windows: int
    """Windows of all images together."""
    num_heads: int
    num_tokens: int
    """Tokens of a window."""
    head_size: int
    num_region_windows: int = 0
    """Windows of one image if they are shifted; 0 without a mask."""
    table_size: int = 0
    """Rows of the bias table, ``prod(2 window - 1)``; 0 without a table."""
    element_bytes: int = 2

    def __post_init__(self) -> None:
        for name in ("num_windows", "num_heads", "num_tokens", "head_size", "element_bytes"):
            if getattr(self, name) < 1:
                raise ShapeError(f"{name} is {getattr(self, name)}, expected at least 1")
        if self.num_region_windows and self.num_windows % self.num_region_windows:
            raise ShapeError(
                f"num_windows={self.num_windows} is not a multiple of "
                f"num_region_windows={self.num_region_windows}"
            )

    @property
    def num_rows(self) -> int:
        """Query rows of all windows and heads."""
        return self.num_windows * self.num_heads * self.num_tokens

    @property
    def num_scores(self) -> int:
        """``windows x heads x tokens²``: S in the formulas."""
        return self.num_rows * self.num_tokens

    @property
    def tensor_bytes(self) -> int:
        """Bytes of q (and of k, v and out): X in the formulas."""
        return self.num_rows * self.head_size * self.element_bytes

    @property
    def score_matrix_bytes(self) -> int:
        """Bytes of the scores in float32, which eager attention allocates."""
        return self.num_scores * FLOAT32

    @property
    def dense_mask_bytes(self) -> int:
        """Bytes of the shift mask as float32 ``[windows of an image, tokens, tokens]``."""
        return self.num_region_windows * self.num_tokens**2 * FLOAT32

    @property
    def region_bytes(self) -> int:
        """Bytes of the same mask as one byte of region id for each token."""
        return self.num_region_windows * self.num_tokens


def compulsory(
    shape: WindowShape, *, bias: BiasForm | None = None, with_lse: bool = False
) -> Traffic:
    """Count every tensor once; ``with_lse`` adds the log-sum-exp, which a backward pass needs."""
    lse = (Stream("lse", shape.num_rows, FLOAT32, is_write=True),) if with_lse else ()
    return Traffic(
        (*_tensors(shape), *_bias(shape, bias), *_regions(shape, shape.num_region_windows), *lse)
    )


def multiprocessor(
    shape: WindowShape,
    *,
    bias: BiasForm = "matrix",
    mask: Literal["regions", "dense"] = "regions",
    windows_per_program: int = 1,
) -> Traffic:
    """Count what all programs load, with K and V of a window held on chip.

    A program handles one head of ``windows_per_program`` windows. It reads the bias once, and the
    mask for each window. Most of these reads hit in caches.

    Examples:
        >>> shape = WindowShape(343, 3, 343, 8)
        >>> (multiprocessor(shape).bytes - 4 * shape.tensor_bytes) / 1e6
        242.121642
    """
    if windows_per_program < 1:
        raise ShapeError(f"windows_per_program is {windows_per_program}, expected at least 1")
    programs = -(-shape.num_windows // windows_per_program)
    visits = shape.num_windows * shape.num_heads
    masks = _regions(shape, visits)
    if mask == "dense" and shape.num_region_windows:
        masks = (Stream("mask", visits * shape.num_tokens**2, FLOAT32),)
    return Traffic((*_tensors(shape), *_bias(shape, bias, programs), *masks))


def unfused(
    shape: WindowShape, *, how: Literal["half", "amp", "float32", "sdpa"] = "amp"
) -> Traffic:
    """Count what the model libraries move, without their small reads of bias and mask.

    Args:
        shape: The problem.
        how: ``"half"``: all in the element type; scores written, then read and written by bias,
            mask and softmax, and read: 6 passes, 8 with a mask. ``"amp"``: the same under
            autocast, where a float32 bias makes float32 scores: 24 bytes a score, 32 with a mask.
            ``"float32"``: the same in float32. ``"sdpa"``: PyTorch's fused kernel with bias and
            mask added up to one dense mask, as MONAI's flag does: 16 bytes a score with a mask.

    Examples:
        >>> shape = WindowShape(343, 3, 343, 8, num_region_windows=343)
        >>> [round(unfused(shape, how=how).bytes / 1e9, 2) for how in ("half", "amp", "sdpa")]
        [1.98, 3.92, 1.96]
    """
    if how == "sdpa":
        return Traffic((*_tensors(shape), *_dense_mask(shape)))
    size, wide = shape.element_bytes, FLOAT32
    if how == "half":
        wide = size
    elif how == "float32":
        size = wide
    elif how != "amp":
        raise ShapeError(f"how is {how!r}, expected 'half', 'amp', 'float32' or 'sdpa'")
    return Traffic((*_eager_tensors(shape, size), *_passes(shape, size, wide)))


def backward_compulsory(shape: WindowShape) -> Traffic:
    """Count every tensor of a backward pass once: 8 X, statistics, bias, its float32 gradient."""
    size, elements = shape.element_bytes, shape.num_rows * shape.head_size
    reads = tuple(Stream(name, elements, size) for name in ("q", "k", "v", "out", "dout"))
    writes = tuple(Stream(name, elements, size, is_write=True) for name in ("dq", "dk", "dv"))
    statistics = (Stream("lse", shape.num_rows, FLOAT32), Stream("delta", shape.num_rows, FLOAT32))
    bias = _bias(shape, None)
    gradients = (*bias, Stream("dbias", bias[0].elements, FLOAT32, is_write=True))
    regions = _regions(shape, shape.num_region_windows)
    return Traffic((*reads, *writes, *statistics, *gradients, *regions))


def _tensors(shape: WindowShape) -> tuple[Stream, ...]:
    elements, size = shape.num_rows * shape.head_size, shape.element_bytes
    reads = tuple(Stream(name, elements, size) for name in ("q", "k", "v"))
    return (*reads, Stream("out", elements, size, is_write=True))


def _bias(shape: WindowShape, form: BiasForm | None, times: int = 1) -> tuple[Stream, ...]:
    """A table if the shape has one, or else a matrix."""
    form = form or ("table" if shape.table_size else "matrix")
    entries = {"none": 0, "matrix": shape.num_tokens**2, "table": shape.table_size}
    if form not in entries:
        raise ShapeError(f"bias is {form!r}, expected 'matrix', 'table' or 'none'")
    if form == "table" and not shape.table_size:
        raise ShapeError("bias is 'table' but table_size is 0: give WindowShape a table_size")
    count = times * shape.num_heads * entries[form]
    return (Stream("bias", count, shape.element_bytes),) if count else ()


def _regions(shape: WindowShape, num_windows: int) -> tuple[Stream, ...]:
    if not shape.num_region_windows:
        return ()
    return (Stream("regions", num_windows * shape.num_tokens, 1),)


def _eager_tensors(shape: WindowShape, size: int) -> tuple[Stream, ...]:
    """8 X: scaling q takes two, and permuting the output for the projection two more."""
    elements = shape.num_rows * shape.head_size
    return tuple(
        Stream(name, elements, size, is_write)
        for name, is_write in (
            *(("q", False), ("scaled q", True), ("scaled q", False), ("k", False), ("v", False)),
            *(("out", True), ("out", False), ("permuted out", True)),
        )
    )


def _passes(shape: WindowShape, size: int, wide: int) -> tuple[Stream, ...]:
    """Scores are written in ``size``, widened by the bias, and cast back after the softmax."""
    steps = [("scores", size, True), ("bias", size, False), ("bias", wide, True)]
    if shape.num_region_windows:
        steps += [("mask", wide, False), ("mask", wide, True)]
    steps += [("softmax", wide, False), ("softmax", wide, True)]
    if size != wide:
        steps += [("cast", wide, False), ("cast", size, True)]
    steps += [("weights", size, False)]
    return tuple(Stream(name, shape.num_scores, width, is_write) for name, width, is_write in steps)


def _dense_mask(shape: WindowShape) -> tuple[Stream, ...]:
    """The dense mask: summed in float32, cast, padded to whole vectors, and read."""
    size = shape.element_bytes
    if not shape.num_region_windows:
        return _bias(shape, "matrix")
    steps = (
        *(("sum", FLOAT32, True), ("cast", FLOAT32, False), ("cast", size, True)),
        *(("pad", size, False), ("pad", size, True), ("mask", size, False)),
    )
    return tuple(Stream(name, shape.num_scores, width, is_write) for name, width, is_write in steps)
