"""Memory traffic as a list of streams, with their sum."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stream:
    """Elements of one tensor that go one way."""

    tensor: str
    elements: int
    element_bytes: int
    is_write: bool = False

    @property
    def bytes(self) -> int:
        """``elements * element_bytes``."""
        return self.elements * self.element_bytes

    def __str__(self) -> str:
        verb = "write" if self.is_write else "read"
        return f"{verb} {self.tensor}: {self.elements:,} x {self.element_bytes} bytes"


@dataclass(frozen=True)
class Traffic:
    """Streams, in the order in which a kernel meets them.

    Examples:
        >>> traffic = Traffic((Stream("q", 64, 2), Stream("out", 64, 2, is_write=True)))
        >>> traffic.elements, traffic.bytes
        (128, 256)
    """

    streams: tuple[Stream, ...]

    @property
    def elements(self) -> int:
        """Of all streams."""
        return sum(stream.elements for stream in self.streams)

    @property
    def bytes(self) -> int:
        """Of all streams."""
        return sum(stream.bytes for stream in self.streams)

    def without(self, *tensors: str) -> Traffic:
        """The streams of all other tensors."""
        return Traffic(tuple(stream for stream in self.streams if stream.tensor not in tensors))

    def __str__(self) -> str:
        return "\n".join(map(str, self.streams))


def format_count(value: float, unit: str = "B") -> str:
    """A number with a decimal prefix, to three digits: traffic counts by 1000, as bandwidth does.

    Examples:
        >>> format_count(4_822_040), format_count(999.6e6, "FLOP"), format_count(12)
        ('4.82 MB', '1 GFLOP', '12 B')
    """
    steps = ("", "k", "M", "G", "T", "P")
    text = ""
    for power, prefix in enumerate(steps):
        scaled = float(f"{value / 1000**power:.3g}")
        text = f"{scaled:g} {prefix}{unit}"
        if scaled < 1000:
            break
    return text
