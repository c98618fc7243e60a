"""What a patch did, in words."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Entry", "PatchReport"]


_KNOWN = (
    "  known are MONAI's SwinUNETR, Swin v1 and v2 of torchvision and timm, Swin and Swinv2 of "
    "Transformers"
)


@dataclass(frozen=True)
class Entry:
    """One module of the model."""

    name: str
    """Its dotted name; empty for the model itself."""
    what: str
    """What it is (patched), or why it was left alone."""

    def __str__(self) -> str:
        return f"  {self.name or '(the model)'}: {self.what}"


@dataclass(frozen=True)
class PatchReport:
    """What ``swin.patch`` patched, and what it left alone and why. ``print`` it.

    Example:
        >>> report = PatchReport((), (), (Entry("blocks.0.attn", "its forward was replaced"),))
        >>> print(report)
        patched: 0 window attentions
        left alone: 1
          blocks.0.attn: its forward was replaced
    """

    attentions: tuple[Entry, ...]
    """Attentions that now run on ``pagetile.window_attention``."""
    layers: tuple[Entry, ...]
    """Layers that now hand region ids to their attentions instead of dense masks."""
    left_alone: tuple[Entry, ...]
    """Modules that look like one of these, and were not touched."""
    blocks: tuple[Entry, ...] = ()
    """Blocks that now hand whole maps to their attentions instead of windows."""
    mergings: tuple[Entry, ...] = ()
    """Patch mergings that now take all tokens of their cells at once."""
    norms: tuple[Entry, ...] = ()
    """Residual blocks whose instance norms, residual and activation are now one operation each."""

    def __str__(self) -> str:
        lines = [_count("patched", self.attentions, "window attention"), *self.attentions]
        if self.layers:
            lines += [_count("region ids instead of dense masks", self.layers, "layer")]
            lines += self.layers
        if self.blocks:
            lines += [_count("whole maps instead of windows", self.blocks, "block"), *self.blocks]
        if self.mergings:
            lines += [_count("cells at once", self.mergings, "patch merging"), *self.mergings]
        if self.norms:
            lines += [_count("norms and activations in one", self.norms, "residual block")]
            lines += self.norms
        if not self.attentions and not self.left_alone:
            lines.append(_KNOWN)
        if self.left_alone:
            lines += [f"left alone: {len(self.left_alone)}", *self.left_alone]
        return "\n".join(map(str, lines))


def _count(title: str, entries: tuple[Entry, ...], noun: str) -> str:
    return f"{title}: {len(entries)} {noun}{'' if len(entries) == 1 else 's'}"
