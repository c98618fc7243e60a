"""Patch, unpatch, and patch for a while."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module

from torch import nn

from ...errors import DTypeError
from .proof import difference
from .report import Entry, PatchReport
from .swapped import (
    Swapped,
    SwappedAttention,
    SwappedBlock,
    SwappedLayer,
    SwappedMerging,
    SwappedNorms,
    Swaps,
    check_restorable,
    restore,
)

__all__ = ["patch", "patched", "unpatch"]

# A framework's file of Swin models, and ours. A model of it can exist only once it is imported.
ADAPTERS = {
    "monai.networks.nets.swin_unetr": "monai",
    "monai.networks.blocks.dynunet_block": "monai_blocks",
    "torchvision.models.swin_transformer": "torchvision",
    "timm.models.swin_transformer_v2": "timm",
    "transformers.models.swin.modeling_swin": "transformers",
    "transformers.models.swinv2.modeling_swinv2": "transformers",
}

# What attention with a learned window bias keeps, by its names in the frameworks.
MARKS = {"relative_position_bias_table", "cpb_mlp", "continuous_position_bias_mlp", "meta_mlp"}


def patch(model: nn.Module) -> PatchReport:
    """Run a Swin model's window attention on ``pagetile.window_attention``, in place.

    MONAI SwinUNETR, torchvision and timm Swin v1 and v2, Transformers Swin and Swinv2. No tensor
    of scores and no dense shift mask is formed any more. MONAI's blocks attend to whole maps, and
    the residual blocks of its U-Nets run norm and activation in one on a GPU. Parameters, buffers
    and the state dict stay as they are, and so do gradients, up to rounding. Copies and pickles of
    a patched model are patched. Patching twice is patching once.

    On a CPU windows of 7 × 7 tokens gain memory and no time: their dense masks are small.

    The model's own code runs where ours has no answer: under ``torch.export``, ``torch.jit.trace``,
    ``torch.fx`` and ``torch.onnx``; while training with dropout on attention weights; when
    attention weights are asked for. ``torch.jit.script`` unpatches what it compiles. Second
    derivatives raise: unpatch for them. Before a module is patched, a copy of it proves that it
    computes the same both ways.

    Args:
        model: Any module; the modules inside it that we know are patched.

    Returns:
        What was patched, and what was left alone and why. ``print`` it.

    Example:
        >>> from transformers import SwinConfig, SwinModel
        >>> config = SwinConfig(image_size=32, patch_size=2, embed_dim=16, depths=[2],
        ...                     num_heads=[2], window_size=4)
        >>> model = SwinModel(config)
        >>> print(patch(model))
        patched: 2 window attentions
          encoder.layers.0.blocks.0.attention: Transformers Swin, window 4×4, 2 heads of 8
          encoder.layers.0.blocks.1.attention: Transformers Swin, window 4×4, 2 heads of 8
        region ids instead of dense masks: 1 layer
          encoder.layers.0.blocks.1: Transformers, window 4×4, shift 2, 16 channels
        >>> unpatch(model)
    """
    return _patch(model)[0]


def unpatch(model: nn.Module) -> None:
    """Give every patched module of ``model`` its own class back. Nothing of the patch remains.

    Example:
        >>> unpatch(nn.Linear(2, 2))
    """
    _check(model)
    modules = list(model.modules())
    for module in modules:
        check_restorable(module)
    for module in modules:  # a layer comes before its attentions
        restore(module)


@contextmanager
def patched(model: nn.Module) -> Iterator[PatchReport]:
    """``patch`` for the length of a ``with`` block; what was patched before stays patched.

    Example:
        >>> with patched(nn.Linear(2, 2)) as report:
        ...     print(len(report.attentions))
        0
    """
    report, touched = _patch(model)
    try:
        yield report
    finally:
        for module in reversed(touched):  # layers first: their attentions read region ids
            restore(module)


def _patch(model: nn.Module) -> tuple[PatchReport, list[nn.Module]]:
    """The report, and the modules that were not patched before."""
    _check(model)
    swaps = _known()
    proven: dict[tuple[object, ...], str | None] = {}
    touched: list[nn.Module] = []
    left_alone: list[Entry] = []
    # An attention first: whether a block or a layer applies depends on it.
    kinds = SwappedAttention, SwappedBlock, SwappedLayer, SwappedMerging, SwappedNorms
    entries: dict[type[Swapped], list[Entry]] = {kind: [] for kind in kinds}
    for kind in entries:
        for name, module in list(model.named_modules()):
            swap = type(module) if isinstance(module, Swapped) else swaps.get(type(module))
            if swap is None or not issubclass(swap, kind):
                continue
            if not isinstance(module, Swapped):
                if not _applies(module, swap):
                    continue
                reason = _refusal(module, swap, swaps, proven)
                if reason is not None:
                    left_alone.append(Entry(name, reason))
                    continue
                module.__class__ = swap
                touched.append(module)
            entries[kind].append(Entry(name, _describe(module, swap)))
    left_alone += _strangers(model, swaps)
    report = PatchReport(
        attentions=tuple(entries[SwappedAttention]),
        layers=tuple(entries[SwappedLayer]),
        left_alone=tuple(left_alone),
        blocks=tuple(entries[SwappedBlock]),
        mergings=tuple(entries[SwappedMerging]),
        norms=tuple(entries[SwappedNorms]),
    )
    return report, touched


def _check(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise DTypeError(f"model is of type {type(model).__name__}, expected a torch.nn.Module")


def _known() -> Swaps:
    """Every class that we can patch of the frameworks in use, and what it becomes."""
    swaps: Swaps = {}
    for framework, adapter in ADAPTERS.items():
        if framework not in sys.modules:
            continue
        # A release that lacks a class we know is laid out otherwise: all of it stays as it is.
        with suppress(ImportError, AttributeError):
            swaps |= import_module(f".frameworks.{adapter}", __package__).SWAPS
    return swaps


def _applies(module: nn.Module, swap: type[Swapped]) -> bool:
    """Whether there is something to do."""
    try:
        return swap.applies(module)
    except Exception:  # whatever another release's module may lack: its trial will say
        return True


def _refusal(
    module: nn.Module,
    swap: type[Swapped],
    swaps: Swaps,
    proven: dict[tuple[object, ...], str | None],
) -> str | None:
    """Why a module must stay as it is, or None."""
    if "forward" in vars(module):
        return "its forward was replaced on the instance"
    try:
        key = swap, swap.variant(module), *_kinds_inside(module, swap)
    except Exception as error:  # whatever another release's module may lack
        return f"this release is laid out otherwise: {error}"
    if key not in proven:
        proven[key] = difference(module, swaps)
    return proven[key]


def _kinds_inside(module: nn.Module, swap: type[Swapped]) -> list[type]:
    """What an attention is made of: one that differs proves itself."""
    return [type(each) for each in module.modules()] if issubclass(swap, SwappedAttention) else []


def _describe(module: nn.Module, swap: type[Swapped]) -> str:
    words = f"{swap.variant(module)}, {swap.width(module)}"
    rate = swap.weight_dropout(module) if issubclass(swap, SwappedAttention) else 0.0
    return f"{words} (its own code while training: attention dropout {rate:g})" if rate else words


def _strangers(model: nn.Module, swaps: Swaps) -> Iterator[Entry]:
    """Modules that look like window attention and are none that we know."""
    known: set[nn.Module] = set()
    for name, module in model.named_modules():
        swap = type(module) if isinstance(module, Swapped) else swaps.get(type(module))
        if swap is not None:
            known.update(module.modules() if issubclass(swap, SwappedAttention) else [module])
        if module in known:
            continue
        inside = list(module.modules())
        kind = f"{type(module).__module__}.{type(module).__qualname__}"
        if isinstance(module, tuple(swaps)):
            known.update(inside)
            yield Entry(name, f"{kind} is a subclass of one we know, and may differ from it")
        elif any(own in MARKS for own in (*module._parameters, *module._modules)):
            yield Entry(name, f"no drop-in for {kind}")
