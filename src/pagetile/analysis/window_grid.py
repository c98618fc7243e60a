"""A map cut into windows, and the effect of a cyclic shift on them.

As in Swin, the map is padded to whole windows and rolled by the shift, so that windows at the far
borders hold tokens that were not neighbours; a region id for each token tells which were.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from ..errors import ShapeError
from .window_io import WindowShape

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class WindowGrid:
    """The sizes of a map, its windows and their shift.

    Examples:
        >>> grid = WindowGrid.of((48, 48, 48), (7, 7, 7), (3, 3, 3))
        >>> grid.padded, grid.num_windows, grid.num_masked
        ((49, 49, 49), 343, 127)
        >>> WindowGrid.of((6, 6, 6), (7, 7, 7), (3, 3, 3))  # one window, clamped to the map
        WindowGrid(size=(6, 6, 6), window=(6, 6, 6), shift=(0, 0, 0))
    """

    size: tuple[int, ...]
    """Tokens of the map along each axis."""
    window: tuple[int, ...]
    shift: tuple[int, ...]

    @classmethod
    def of(cls, size: Sequence[int], window: Sequence[int], shift: Sequence[int]) -> WindowGrid:
        """Make a grid as the model libraries do: an axis that one window covers is not shifted.

        Raises:
            ShapeError: The axes disagree in number, or a number is out of range.
        """
        if not len(size) == len(window) == len(shift) or not size:
            raise ShapeError(
                f"grid {list(size)}, window {list(window)} and shift {list(shift)} differ in their "
                "number of axes"
            )
        for length, extent, step in zip(size, window, shift, strict=True):
            if length < 1 or extent < 1 or not 0 <= step < extent:
                raise ShapeError(
                    f"grid {list(size)}, window {list(window)}, shift {list(shift)}: expected "
                    "sizes of at least 1, and shifts from 0 to less than the window"
                )
        axes = list(zip(size, window, shift, strict=True))
        return cls(
            tuple(size),
            tuple(min(length, extent) for length, extent, _ in axes),
            tuple(0 if length <= extent else step for length, extent, step in axes),
        )

    @property
    def padded(self) -> tuple[int, ...]:
        """The size of the map padded to whole windows."""
        return tuple(-(-n // w) * w for n, w in zip(self.size, self.window, strict=True))

    @property
    def windows(self) -> tuple[int, ...]:
        """Windows along each axis."""
        return tuple(n // w for n, w in zip(self.padded, self.window, strict=True))

    @property
    def num_windows(self) -> int:
        """Windows of one map."""
        return math.prod(self.windows)

    @property
    def num_tokens(self) -> int:
        """Tokens of one window."""
        return math.prod(self.window)

    @property
    def num_padding(self) -> int:
        """Padded tokens of all windows together; they attend like the others."""
        return math.prod(self.padded) - math.prod(self.size)

    @property
    def num_masked(self) -> int:
        """Windows with more than one region: all but ``prod(windows - 1)`` over shifted axes."""
        pairs = zip(self.windows, self.shift, strict=True)
        return self.num_windows - math.prod(n - 1 if step else n for n, step in pairs)

    @property
    def table_size(self) -> int:
        """Rows of the relative-position table: ``prod(2 window - 1)``."""
        return math.prod(2 * extent - 1 for extent in self.window)

    @cached_property
    def regions(self) -> Tensor:
        """uint8 ``[num_windows, num_tokens]``: ``pagetile.shift_regions`` of the padded map."""
        from ..ops.window_attention import shift_regions

        return shift_regions(self.padded, self.window, self.shift)

    def region_map(self) -> Tensor:
        """uint8, the shape of the padded map: the region of each token after the roll."""
        count = len(self.size)
        parts = self.regions.reshape(*self.windows, *self.window)
        order = [axis for pair in ((i, count + i) for i in range(count)) for axis in pair]
        return parts.permute(order).reshape(self.padded)

    def shape(
        self, *, num_images: int, num_heads: int, head_size: int, element_bytes: int = 2
    ) -> WindowShape:
        """The shape of one attention call over these windows, for counting its bytes.

        Raises:
            ShapeError: A number is less than 1.
        """
        if num_images < 1:
            raise ShapeError(f"num_images is {num_images}, expected at least 1")
        return WindowShape(
            self.num_windows * num_images,
            num_heads,
            self.num_tokens,
            head_size,
            self.num_windows if any(self.shift) else 0,
            self.table_size,
            element_bytes,
        )
