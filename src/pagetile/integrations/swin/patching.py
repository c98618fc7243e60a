"""Patch and unpatch the modules of a model."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module

from torch import nn

from ...errors import DTypeError
from .proof import difference
from .report import Entry, PatchReport
from .swapped import Swapped, SwappedAttention, Swaps, check_restorable, restore

# A framework's module with Swin models, and our adapter of it. Models exist only once the
# framework's module was imported.
ADAPTERS = {
    "monai.networks.nets.swin_unetr": "monai",
    "monai.networks.blocks.dynunet_block": "monai_blocks",
    "torchvision.models.swin_transformer": "torchvision",
    "timm.models.swin_transformer_v2": "timm",
    "transformers.models.swin.modeling_swin": "transformers",
    "transformers.models.swinv2.modeling_swinv2": "transformers",
}

# Names of parameters and submodules that only window attention with a learned bias has.
BIAS_NAMES = {"relative_position_bias_table", "cpb_mlp", "continuous_position_bias_mlp", "meta_mlp"}


def patch(model: nn.Module) -> PatchReport:
    """Run a Swin model's window attention on ``pagetile.window_attention``, in place.

    Supports MONAI's SwinUNETR, Swin v1 and v2 of torchvision and timm, torchvision's Video Swin,
    and Swin and Swinv2 of Transformers. A patched model builds no matrix of scores and no dense
    shift mask. MONAI's blocks attend to whole maps, and on a GPU the residual blocks of its U-Nets
    run norm, residual and activation in one kernel. Parameters, buffers and the state dict stay as
    they are; outputs and gradients stay the same up to rounding. Copies and pickles of a patched
    model are patched. Patching twice equals patching once.

    On a CPU, windows of 7 × 7 tokens save memory but no time: their dense masks are small.

    The model's own code still runs under ``torch.export``, ``torch.jit.trace``, ``torch.fx`` and
    ``torch.onnx``, while training with dropout on attention weights, and when attention weights are
    requested. ``torch.jit.script`` unpatches the modules that it compiles. Second derivatives
    raise: unpatch for them. Before a module is patched, a copy of it is run both ways and compared.

    Args:
        model: Any module; every supported module inside it is patched.

    Returns:
        The patched modules, and those left alone with the reason; ``print`` it.

    Raises:
        DTypeError: ``model`` is not a ``torch.nn.Module``.

    Warns:
        UserWarning: No window attention was patched; the message says why.

    Examples:
        >>> from transformers import SwinConfig, SwinModel
        >>> config = SwinConfig(image_size=32, patch_size=2, embed_dim=16, depths=[2],
        ...                     num_heads=[2], window_size=4)
        >>> model = SwinModel(config)
        >>> print(patch(model))
        patched 2 window attentions, 1 layer; left nothing alone
        attention on pagetile.window_attention: 2 window attentions
          encoder.layers.0.blocks.0.attention: Transformers Swin, window 4×4, 2 heads of 8
          encoder.layers.0.blocks.1.attention: Transformers Swin, window 4×4, 2 heads of 8
        region ids instead of dense masks: 1 layer
          encoder.layers.0.blocks.1: Transformers, window 4×4, shift 2, 16 channels
        >>> unpatch(model)
    """
    return _patch(model, stacklevel=3)[0]


def unpatch(model: nn.Module) -> None:
    """Restore the original class of every patched module of ``model``.

    Examples:
        >>> unpatch(nn.Linear(2, 2))
    """
    _check(model)
    modules = list(model.modules())
    for module in modules:
        check_restorable(module)
    for module in modules:  # layers come before their attentions
        restore(module)


@contextmanager
def patched(model: nn.Module) -> Iterator[PatchReport]:
    """``patch`` a model for a ``with`` block; modules that were patched before stay patched.

    Examples:
        >>> from transformers import SwinConfig, SwinModel
        >>> config = SwinConfig(image_size=32, patch_size=2, embed_dim=16, depths=[1],
        ...                     num_heads=[2], window_size=4)
        >>> with patched(SwinModel(config)) as report:
        ...     print(report.summary)
        patched 1 window attention; left nothing alone
    """
    report, touched = _patch(model, stacklevel=4)
    try:
        yield report
    finally:
        for module in reversed(touched):  # layers first: their attentions read region ids
            restore(module)


def _patch(model: nn.Module, stacklevel: int) -> tuple[PatchReport, list[nn.Module]]:
    """Patch a model; return the report, and the modules that were not patched before."""
    _check(model)
    swaps = _supported_classes()
    proven: dict[tuple[object, ...], str | None] = {}
    touched: list[nn.Module] = []
    left_alone: list[Entry] = []
    # Attentions first: blocks and layers are patched only if their attentions were.
    sections = ("attentions", "blocks", "layers", "mergings", "norms")
    entries: dict[str, list[Entry]] = {section: [] for section in sections}
    for section, found in entries.items():
        for name, module in list(model.named_modules()):
            swap = type(module) if isinstance(module, Swapped) else swaps.get(type(module))
            if swap is None or swap.section != section:
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
            found.append(Entry(name, _describe(module, swap)))
    left_alone += _unsupported(model, swaps)
    patched_parts = {section: tuple(found) for section, found in entries.items()}
    report = PatchReport(left_alone=tuple(left_alone), **patched_parts)
    if not report.attentions and (report.is_empty or left_alone):
        reason = (
            "it has no window attention of a supported class. Those of MONAI, torchvision, timm "
            "and Transformers are supported; import the framework first"
        )
        if left_alone:
            first = left_alone[0]
            where = f"{first.name or 'the model'}: {first.what}"
            reason = (
                f"{report.summary.partition('; ')[2]}, the first being {where}. A window attention "
                "of your own can call pagetile.window_attention or shifted_window_attention itself"
            )
        what = "nothing" if report.is_empty else "no window attention"
        message = f"swin.patch patched {what} in {type(model).__name__}: {reason}"
        warnings.warn(message, stacklevel=stacklevel)
    return report, touched


def _check(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise DTypeError(f"model is of type {type(model).__name__}, expected a torch.nn.Module")


def _supported_classes() -> Swaps:
    """The classes of the imported frameworks that can be patched, and their replacements."""
    swaps: Swaps = {}
    for framework, adapter in ADAPTERS.items():
        if framework not in sys.modules:
            continue
        # A release that lacks a class has another structure: leave all of it alone.
        with suppress(ImportError, AttributeError):
            swaps |= import_module(f".frameworks.{adapter}", __package__).SWAPS
    return swaps


def _applies(module: nn.Module, swap: type[Swapped]) -> bool:
    """Return whether patching changes anything for this module."""
    try:
        return swap.applies(module)
    except Exception:  # another release's module may lack attributes: the comparison decides
        return True


def _refusal(
    module: nn.Module,
    swap: type[Swapped],
    swaps: Swaps,
    proven: dict[tuple[object, ...], str | None],
) -> str | None:
    """Return why a module must be left alone, or None."""
    if "forward" in vars(module):
        return "its forward was replaced on the instance"
    try:
        key = swap, swap.variant(module), *_kinds_inside(module, swap)
    except Exception as error:  # another release's module may lack attributes
        return f"this release has another structure: {error}"
    if key not in proven:
        proven[key] = difference(module, swaps)
    return proven[key]


def _kinds_inside(module: nn.Module, swap: type[Swapped]) -> list[type]:
    """Return the classes inside an attention; each combination is compared separately."""
    return [type(each) for each in module.modules()] if issubclass(swap, SwappedAttention) else []


def _describe(module: nn.Module, swap: type[Swapped]) -> str:
    words = f"{swap.variant(module)}, {swap.width(module)}"
    rate = swap.weight_dropout(module) if issubclass(swap, SwappedAttention) else 0.0
    return f"{words} (its own code while training: attention dropout {rate:g})" if rate else words


def _unsupported(model: nn.Module, swaps: Swaps) -> Iterator[Entry]:
    """Modules that look like window attention but are of no supported class."""
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
            yield Entry(name, f"{kind} is a subclass of a supported class, and may differ from it")
        elif any(own in BIAS_NAMES for own in (*module._parameters, *module._modules)):
            yield Entry(name, f"{kind} is not supported")
