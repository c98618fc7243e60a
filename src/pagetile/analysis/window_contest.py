"""Window attention and the code that Swin models run: a problem for ``compare``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ..ops.window_attention import rel_offsets, window_attention
from ..shapes import dtype_name
from .contests import on_each_backend
from .roofline import window_training_work, window_work
from .side_by_side import Contest
from .window_grid import WindowGrid

Gradients = tuple[Tensor, ...]


def windows_contest(
    grid: WindowGrid,
    *,
    num_images: int,
    num_heads: int,
    head_size: int,
    dtype: torch.dtype,
    device: torch.device,
    backward: bool = False,
) -> Contest:
    """``pagetile.window_attention``, eager code, and PyTorch's fused kernels with a dense mask.

    All get a bias table and, if the grid is shifted, the shift mask: pagetile as region ids, the
    others as a dense mask made beforehand. With ``backward`` all of them also compute the
    gradients of q, k, v and the table.

    Examples:
        >>> grid = WindowGrid.of((8, 8), (4, 4), (2, 2))
        >>> contest = windows_contest(
        ...     grid, num_images=1, num_heads=2, head_size=8, backward=True,
        ...     dtype=torch.float32, device=torch.device("cpu"),
        ... )
        >>> [tuple(gradient.shape) for gradient in contest.expected]
        [(4, 2, 16, 8), (4, 2, 16, 8), (4, 2, 16, 8), (49, 2)]
    """
    sizes = (grid.num_windows * num_images, num_heads, grid.num_tokens, head_size)
    x = _make(grid, sizes, dtype, device)
    contestants: dict[str, Callable[[], Tensor]] = {
        "pagetile.window_attention": x.pagetile,
        "eager, as Swin models": x.eager,
        "PyTorch SDPA, dense mask": x.fused,
        **on_each_backend(x.fused, device),
    }
    shape = grid.shape(
        num_images=num_images,
        num_heads=num_heads,
        head_size=head_size,
        element_bytes=dtype.itemsize,
    )
    title = (
        f"{len(x.q):,} windows x {num_heads} heads x {grid.num_tokens} tokens x {head_size}"
        f"{', shifted' * (x.mask is not None)}, {dtype_name(dtype)}"
    )
    if not backward:
        work = window_work(shape, dtype=dtype_name(dtype))
        return Contest(title, contestants, (x.exact(),), work)
    return Contest(
        f"{title}, forward and backward",
        {name: x.step(forward) for name, forward in contestants.items()},
        x.exact_gradients(),
        window_training_work(shape, dtype=dtype_name(dtype)),
    )


@dataclass(frozen=True)
class _Windows:
    q: Tensor  # [num_windows, num_heads, num_tokens, head_size]
    k: Tensor
    v: Tensor
    table: Tensor  # [table_size, num_heads]
    dout: Tensor  # like q
    offsets: Tensor  # [num_tokens]
    index: Tensor  # [num_tokens, num_tokens], into the table
    regions: Tensor | None  # [windows of an image, num_tokens]
    mask: Tensor | None  # [windows of an image, num_tokens, num_tokens]

    @property
    def learned(self) -> Gradients:
        return self.q, self.k, self.v, self.table

    def pagetile(self) -> Tensor:
        return window_attention(
            self.q, self.k, self.v,
            bias_table=self.table, rel_offsets=self.offsets, regions=self.regions,
        ).out  # fmt: skip

    def eager(self) -> Tensor:
        """Scores, bias, mask and softmax one after the other."""
        scores = torch.matmul(self.q * self.q.shape[-1] ** -0.5, self.k.mT) + self.bias()
        if self.mask is not None:
            by_image = scores.view(-1, len(self.mask), *scores.shape[1:]) + self.mask[:, None]
            scores = by_image.flatten(0, 1)
        return torch.matmul(scores.softmax(-1), self.v)

    def fused(self) -> Tensor:
        dense = self.bias()
        if self.mask is not None:
            dense = (dense + self.mask[:, None]).repeat(len(self.q) // len(self.mask), 1, 1, 1)
        return scaled_dot_product_attention(self.q, self.k, self.v, attn_mask=dense)

    def bias(self) -> Tensor:
        return self.table[self.index].permute(2, 0, 1)

    def step(self, forward: Callable[[], Tensor]) -> Callable[[], Gradients]:
        """A call that computes the gradients by a forward and a backward pass."""
        for tensor in self.learned:
            tensor.requires_grad_()
        return lambda: torch.autograd.grad(forward(), self.learned, self.dout)

    def window(self, at: int) -> _Windows:
        """One window in float64."""
        mask = None if self.mask is None else self.mask[at % len(self.mask)][None].double()
        parts = {
            name: getattr(self, name)[at : at + 1].detach().double()
            for name in ("q", "k", "v", "dout")
        }
        return replace(self, **parts, table=self.table.detach().double(), mask=mask)

    def exact(self) -> Tensor:
        """The output in float64, one window after the other."""
        return torch.cat([self.window(at).eager() for at in range(len(self.q))])

    def exact_gradients(self) -> Gradients:
        parts = []
        for at in range(len(self.q)):
            window = self.window(at)
            parts.append(window.step(window.eager)())
        *rows, tables = zip(*parts, strict=True)
        return (*(torch.cat(part) for part in rows), torch.stack(tables).sum(0))


def _make(
    grid: WindowGrid, sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> _Windows:
    """Draw q, k, v and dout of ``sizes``, and a bias table."""
    random = torch.Generator(device).manual_seed(0)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, dtype=dtype, device=device, generator=random)

    offsets = rel_offsets(grid.window).to(device)
    regions = mask = None
    if any(grid.shift):
        regions = grid.regions.to(device)
        same = regions[:, :, None] == regions[:, None, :]
        mask = torch.where(same, 0.0, -100.0).to(dtype)
    return _Windows(
        normal(*sizes),
        normal(*sizes),
        normal(*sizes),
        normal(grid.table_size, sizes[1]),
        normal(*sizes),
        offsets,
        (offsets[:, None] - offsets[None, :] + grid.table_size // 2).long(),
        regions,
        mask,
    )
