"""The report of ``swin.patch``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

_SUPPORTED = (
    "  supported: MONAI's SwinUNETR, Swin v1 and v2 of torchvision and timm, torchvision's Video "
    "Swin, Swin and Swinv2 of Transformers"
)
_SECTIONS = {
    "attentions": ("attention on pagetile.window_attention", "window attention"),
    "layers": ("region ids instead of dense masks", "layer"),
    "blocks": ("whole maps instead of windows", "block"),
    "mergings": ("one gather instead of a slice for each token", "patch merging"),
    "norms": ("instance norm, residual and activation in one kernel", "residual block"),
}


@dataclass(frozen=True)
class Entry:
    """One module of the model."""

    name: str
    """Its dotted name; empty for the model itself."""
    what: str
    """A description of a patched module, or why it was left alone."""

    def __str__(self) -> str:
        return f"  {self.name or '(the model)'}: {self.what}"


@dataclass(frozen=True)
class PatchReport:
    """Modules that ``swin.patch`` patched, and those that it left alone, with the reason.

    Examples:
        >>> report = PatchReport((), (), (Entry("blocks.0.attn", "its forward was replaced"),))
        >>> print(report)
        patched nothing; left 1 module alone
        left alone: 1 module
          blocks.0.attn: its forward was replaced
    """

    attentions: tuple[Entry, ...]
    """Attentions that now run on ``pagetile.window_attention``."""
    layers: tuple[Entry, ...]
    """Layers that now hand region ids to their attentions instead of dense masks."""
    left_alone: tuple[Entry, ...]
    """Modules that look like one of these, and were not patched."""
    blocks: tuple[Entry, ...] = ()
    """Blocks that now hand whole maps to their attentions instead of windows."""
    mergings: tuple[Entry, ...] = ()
    """Patch mergings that now gather all tokens of their cells at once."""
    norms: tuple[Entry, ...] = ()
    """Residual blocks whose instance norms, residual and activation are now one operation each."""

    @property
    def summary(self) -> str:
        """One line: how many modules of each kind were patched, and how many were left alone."""
        patched = ", ".join(
            _count(getattr(self, name), noun)
            for name, (_, noun) in _SECTIONS.items()
            if getattr(self, name)
        )
        alone = _count(self.left_alone, "module") if self.left_alone else "nothing"
        return f"patched {patched or 'nothing'}; left {alone} alone"

    @property
    def is_empty(self) -> bool:
        """Whether nothing was patched."""
        return not any(getattr(self, name) for name in _SECTIONS)

    def __str__(self) -> str:
        lines: list[object] = [self.summary]
        for name, (title, noun) in _SECTIONS.items():
            entries = getattr(self, name)
            if entries:
                lines += [f"{title}: {_count(entries, noun)}", *entries]
        if self.is_empty and not self.left_alone:
            lines.append(_SUPPORTED)
        if self.left_alone:
            lines += [f"left alone: {_count(self.left_alone, 'module')}", *self.left_alone]
        return "\n".join(map(str, lines))


def times(sizes: Iterable[int]) -> str:
    """Format sizes along the axes.

    Examples:
        >>> times((7, 7, 7))
        '7×7×7'
    """
    return "×".join(map(str, sizes))


def heads(dim: int, num_heads: int) -> str:
    """Format number and size of heads.

    Examples:
        >>> heads(48, 3)
        '3 heads of 16'
    """
    return f"{num_heads} heads of {dim // num_heads}"


def _count(entries: tuple[Entry, ...], noun: str) -> str:
    return f"{len(entries)} {noun}{'' if len(entries) == 1 else 's'}"
