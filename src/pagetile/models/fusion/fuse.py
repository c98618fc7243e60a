"""Fuses a model: finds the replacements of its modules' ``forward`` during a step."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..attention import AttentionLayer
from ..fused import Replacement, own_forward, read_norm
from ..linears import forward_of_few
from .ends import find_angles, last_norm, table_of_tokens
from .layer import FusedLayer, Link, Watch
from .structure import Mismatch, Mlp, Structure, first_of, recognise
from .trace import GAINS, LayerCall, ModelTrace, run_layer, trace_model
from .weights import can_merge

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_OPTIONS = {"scaling": "softmax_scale", "sliding_window": "sliding_window",
            "softcap": "logits_soft_cap", "s_aux": "sinks"}  # fmt: skip
"""Arguments of Transformers' attention functions, and of ``paged_attention``."""


@dataclass(eq=False)
class Fusion:
    """The replacements found for a model."""

    replacements: list[Replacement] = field(default_factory=list)
    """All replacements, those that were given included."""
    reasons: dict[str, str | None] = field(default_factory=dict)
    """For each decoder layer by name, why it is not fused; ``None``: it is."""


@torch.no_grad()
def fuse(
    model: PreTrainedModel,
    attention: Sequence[AttentionLayer],
    max_model_len: int | None,
    replacements: Sequence[Replacement],
    impl: str,
) -> Fusion:
    """Recognise decoder layers, embedding, norm and head, and merge the layers' weights."""
    names = {module: name for name, module in model.named_modules()}
    parents = {layer: _find_parent(model, names, layer.module) for layer in attention}
    layers: dict[nn.Module, nn.Module] = {
        parent: layer.module for layer, parent in parents.items() if parent is not None
    }
    found = Fusion([*replacements])
    forwards = {module: value for module, name, value in replacements if name == "forward"}
    try:
        trace = trace_model(model, layers, max_model_len)
    except Exception as error:  # a model may raise anything for random inputs
        found.reasons = {names[layer]: f"its model cannot be traced: {error}" for layer in layers}
        return found
    calls = {call.module: call for call in trace.layers}
    fused: dict[nn.Module, FusedLayer] = {}
    kinds: set[Hashable] = set()
    with _without_tf32():
        for layer, parent in parents.items():
            if parent is None:
                continue
            gains = GAINS if impl != "cpu" or _kind(parent) not in kinds else GAINS[:1]
            kinds.add(_kind(parent))
            made = _fuse_layer(model, calls.get(parent), layer, impl, gains)
            found.reasons[names[parent]] = made if isinstance(made, str) else None
            if isinstance(made, FusedLayer):
                fused[parent] = made
                made.watch = _watch(made.structure, forwards)
    _connect(fused, trace, found, forwards)
    if impl != "cpu":  # where torch's own lookups are as fast
        found.replacements += [
            (module, "forward", forward)
            for module, forward in find_angles(trace, max_model_len, impl)
        ]
        found.replacements += _find_ends(model, impl)
    return found


def _find_ends(model: PreTrainedModel, impl: str) -> list[Replacement]:
    """Return replacements of the token embedding and of the language model's head."""
    found: list[Replacement] = []
    embedding = model.get_input_embeddings()
    take = table_of_tokens(embedding, impl)
    if take is not None:
        found.append((embedding, "forward", take))
    head = model.get_output_embeddings()
    forward = None if head is None else forward_of_few(head, impl)
    if head is not None and forward is not None:
        found.append((head, "forward", forward))
    return found


def _find_parent(
    model: nn.Module, names: dict[nn.Module, str], module: nn.Module
) -> nn.Module | None:
    """Return the element of a list of modules that contains a module."""
    path = names[module].split(".")
    for at in reversed(range(1, len(path))):
        if isinstance(model.get_submodule(".".join(path[:at])), nn.ModuleList):
            return model.get_submodule(".".join(path[: at + 1]))
    return None


def _kind(layer: nn.Module) -> Hashable:
    """Return the classes of a layer's modules and the shapes of its weights.

    A run with scaled weights copies the layer's weights, which takes seconds on a CPU for a whole
    model. There only the first layer of a kind is run so.
    """
    classes = tuple((name, type(module)) for name, module in layer.named_modules())
    return classes, tuple(parameter.shape for parameter in layer.parameters())


def _fuse_layer(
    model: PreTrainedModel,
    call: LayerCall | None,
    layer: AttentionLayer,
    impl: str,
    gains: Sequence[float | None],
) -> FusedLayer | str:
    """Return the layer's fused forward, or why there is none."""
    if call is None or not call.args:
        return "it is not called with its hidden states first"
    if not layer.writes:
        return "it reads the keys of another layer"
    if any(
        own_forward(module) is None or module._forward_hooks or module._forward_pre_hooks
        for module in call.module.modules()
    ):
        return "other code has put a hook or a forward on one of its modules"
    options = {name: value for name, value in call.attention.options.items() if name in _OPTIONS}
    sinks = options.get("s_aux")
    if sinks is not None and not isinstance(sinks, nn.Parameter):
        return "it computes its sinks"
    try:
        runs = [run_layer(model, call, gain) for gain in gains]
        structure = recognise(call, runs)
    except Mismatch as error:
        return str(error)
    except Exception as error:  # a layer may raise anything for float32 or random inputs
        return f"it cannot be traced: {error}"
    groups = [structure.qkv, (structure.o,)]
    if isinstance(structure.mlp, Mlp):
        groups += [structure.mlp.gate_up, (structure.mlp.down,)]
    if not all(map(can_merge, groups)):
        return "weights of its products cannot lie side by side"
    given = {_OPTIONS[name]: value for name, value in options.items()}
    return FusedLayer(structure, layer, given, frozenset(call.kwargs), impl)


def _watch(structure: Structure, forwards: dict[nn.Module, Any]) -> Watch:
    """Return the modules that a fused layer does not call, and their replaced ``forward``s."""
    called = structure.mlp.modules() if isinstance(structure.mlp, nn.Module) else ()
    left = {structure.layer, *called}
    inside = [module for module in structure.layer.modules() if module not in left]
    return Watch([(module, forwards.get(module)) for module in inside])


def _connect(
    fused: dict[nn.Module, FusedLayer],
    trace: ModelTrace,
    found: Fusion,
    forwards: dict[nn.Module, Any],
) -> None:
    """Let each layer compute the norm that comes after it."""
    outputs = {id(first_of(call.output)): call.module for call in trace.layers}
    for call in trace.layers:
        layer = fused.get(call.module)
        if layer is None:
            continue
        previous = outputs.get(id(call.args[0]))
        if previous is not None and previous in fused:
            fused[previous].after = layer.before
    for event in trace.others:
        previous = outputs.get(id(event.input))
        forward = forwards.get(event.module)
        if previous is None or previous not in fused or forward is None:
            continue
        norm = read_norm(event.module)
        if norm is None:
            continue
        link = fused[previous].after = Link(norm)
        found.replacements.remove((event.module, "forward", forward))
        found.replacements.append((event.module, "forward", last_norm(link, forward)))
    found.replacements += [(module, "forward", layer.forward) for module, layer in fused.items()]


class _without_tf32:
    """Context in which float32 products are exact (no TF32)."""

    def __enter__(self) -> None:
        self.before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")

    def __exit__(self, *error: object) -> None:
        torch.set_float32_matmul_precision(self.before)
