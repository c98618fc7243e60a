"""How a module is patched: its class is exchanged for a subclass of itself.

Parameters, buffers, hooks, names and so the state dict stay as they are; ``isinstance`` holds;
copies and pickles of a patched module are patched; one assignment patches, one restores.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor, nn

from ...errors import UnsupportedError
from .attend import is_watched, stands_aside
from .masks import RegionMemory

__all__ = [
    "Randn",
    "Swapped",
    "SwappedAttention",
    "SwappedBlock",
    "SwappedLayer",
    "SwappedMerging",
    "SwappedNorms",
    "Swaps",
    "check_restorable",
    "restore",
]


Randn = Callable[..., Tensor]
"""``randn(*shape)``: normal float64 numbers."""


class Swapped:
    """What a patched module is besides its framework's class."""

    original: ClassVar[Any]

    @classmethod
    def applies(cls, module: Any) -> bool:
        """Whether there is something to do for this module of the original class."""
        return True

    @staticmethod
    def variant(module: Any) -> str:
        """What it is, in a few words. Modules of the same words differ in nothing but width."""
        raise NotImplementedError

    @staticmethod
    def width(module: Any) -> str:
        """How wide it is."""
        raise NotImplementedError

    @staticmethod
    def trial(module: Any, randn: Randn) -> Tensor:
        """What a module of either class computes on a small input that leaves nothing out."""
        raise NotImplementedError

    @property
    def region_memory(self) -> RegionMemory:
        """The module's memory of region ids."""
        memory: RegionMemory = self.__dict__.setdefault("_regions", RegionMemory())
        return memory

    def __prepare_scriptable__(self) -> Any:
        # torch.jit.script asks each module for what it shall compile, and keeps the answer in the
        # model's place: the patch is gone from what was scripted.
        restore(self)
        return self


class SwappedAttention(Swapped):
    """An attention that runs on ``pagetile.window_attention``."""

    @staticmethod
    def weight_dropout(module: Any) -> float:
        """The dropout rate of the attention weights."""
        raise NotImplementedError

    passed_by: ClassVar[tuple[str, ...]] = ()
    """Names of submodules that the original calls and ours does not."""

    def needs_original(self, x: Tensor, mask: Tensor | None = None) -> bool:
        """Whether this call is the original's to answer."""
        parts = [part for part in map(self._modules.get, self.passed_by) if part is not None]  # type: ignore[attr-defined]
        # A dropout may draw in a model that is evaluated, to see how much it matters.
        is_training = self.training or any(part.training for part in parts)  # type: ignore[attr-defined]
        drops = is_training and self.weight_dropout(self) > 0
        return drops or any(map(is_watched, parts)) or stands_aside(x, mask)


class _Provider(Swapped):
    """What hands its attentions something that only ours read."""

    @staticmethod
    def attentions_of(module: Any) -> list[Any]:
        """Every module that it goes to."""
        raise NotImplementedError

    @classmethod
    def applies(cls, module: Any) -> bool:
        """Whether all of them are ours. One may be unpatched later: asked on every call."""
        return all(
            isinstance(attention, SwappedAttention) for attention in cls.attentions_of(module)
        )


class SwappedLayer(_Provider):
    """A layer that hands region ids to its attentions."""


class SwappedBlock(_Provider):
    """A block that hands whole maps to its attention instead of windows."""


class SwappedMerging(Swapped):
    """A patch merging that takes all tokens of its cells at once."""


class SwappedNorms(Swapped):
    """A block whose norms, residual and activations are one operation each."""


def check_restorable(module: Any) -> None:
    """Raise UnsupportedError where a patched class was made into another: by a parametrization."""
    kind = type(module)
    if isinstance(module, Swapped) and "original" not in vars(kind):
        raise UnsupportedError(
            f"{kind.__name__} was made of a patched class: undo that first "
            "(torch.nn.utils.parametrize.remove_parametrizations, for one), and then unpatch"
        )


def restore(module: Any) -> None:
    """Give a module its own class back; nothing if it has it."""
    if not isinstance(module, Swapped):
        return
    check_restorable(module)
    module.__class__ = module.original
    module.__dict__.pop("_regions", None)


Swaps = dict[type[nn.Module], type[Swapped]]
