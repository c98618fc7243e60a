"""A module is patched by replacing its class with a subclass.

Parameters, buffers, hooks, names and the state dict stay as they are, and ``isinstance`` holds.
Copies and pickles of a patched module are patched. One assignment patches, and one restores.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor, nn

from ...errors import UnsupportedError
from .attend import has_hooks, must_fall_back
from .masks import RegionMemory

Randn = Callable[..., Tensor]
"""``randn(*shape)``: normal float64 numbers."""


class Swapped:
    """Base of the replacement classes, beside the framework's class."""

    original: ClassVar[Any]
    section: ClassVar[str]
    """The field of ``PatchReport`` that lists it."""

    @classmethod
    def applies(cls, module: Any) -> bool:
        """Whether the replacement changes anything for this module of the original class."""
        return True

    @staticmethod
    def variant(module: Any) -> str:
        """A short description; modules with equal descriptions differ only in width."""
        raise NotImplementedError

    @staticmethod
    def width(module: Any) -> str:
        """The module's width, for the report."""
        return f"{module.dim} channels"

    @staticmethod
    def trial(module: Any, randn: Randn) -> Tensor:
        """Run a module of either class on a small input that reaches all of its code."""
        raise NotImplementedError

    @property
    def region_memory(self) -> RegionMemory:
        """The module's cache of region ids."""
        memory: RegionMemory = self.__dict__.setdefault("_regions", RegionMemory())
        return memory

    def __prepare_scriptable__(self) -> Any:
        # torch.jit.script compiles the module that this returns, and puts it in the model's place,
        # so scripting unpatches.
        restore(self)
        return self


class SwappedAttention(Swapped):
    """An attention that runs on ``pagetile.window_attention``."""

    section = "attentions"

    @staticmethod
    def weight_dropout(module: Any) -> float:
        """The dropout rate of the attention weights."""
        return float(module.attn_drop.p)

    bypassed: ClassVar[tuple[str, ...]] = ()
    """Names of submodules that the original calls and the replacement does not."""

    def needs_original(self, x: Tensor, mask: Tensor | None = None) -> bool:
        """Whether this call must run the original code."""
        parts = [part for part in map(self._modules.get, self.bypassed) if part is not None]  # type: ignore[attr-defined]
        # Dropout modules may be in training mode inside a model that is evaluated.
        is_training = self.training or any(part.training for part in parts)  # type: ignore[attr-defined]
        drops = is_training and self.weight_dropout(self) > 0
        return drops or any(map(has_hooks, parts)) or must_fall_back(x, mask)


class SwappedLayer(Swapped):
    """A layer or block that passes its attentions what only patched ones accept."""

    section = "layers"

    @staticmethod
    def attentions_of(module: Any) -> list[Any]:
        """The attentions that it passes this to."""
        return [getattr(module, "attn", None)]

    @classmethod
    def applies(cls, module: Any) -> bool:
        """Whether all of them are patched; asked on every call, as one may be unpatched later."""
        return all(isinstance(each, SwappedAttention) for each in cls.attentions_of(module))


def check_restorable(module: Any) -> None:
    """Raise UnsupportedError for a class derived from a patched one, as parametrizations make."""
    kind = type(module)
    if isinstance(module, Swapped) and "original" not in vars(kind):
        raise UnsupportedError(
            f"{kind.__name__} is derived from a patched class: undo that first, for example by "
            "torch.nn.utils.parametrize.remove_parametrizations, and then unpatch"
        )


def restore(module: Any) -> None:
    """Restore a module's original class, if it was patched."""
    if not isinstance(module, Swapped):
        return
    check_restorable(module)
    module.__class__ = module.original
    module.__dict__.pop("_regions", None)


Swaps = dict[type[nn.Module], type[Swapped]]
