"""Records the inputs and results of a model's modules while it runs on random inputs.

The attention function of a trace records its arguments and returns random numbers, so that the
record shows how a layer uses them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..attention import SLOT, collect_configs, driven
from ..probe import AttentionCall, recorder

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TRACE = "pagetile_trace"

GAINS = (None, 1.5, 50.0)
"""Scales of a run's products relative to their input; ``None``: unscaled.

Values around 1 distinguish activations, large ones reveal clamps, and all three reveal additions.
"""

_NUM_TOKENS = 6


@dataclass(frozen=True, eq=False)
class Event:
    """One call of a module."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any

    @property
    def input(self) -> Any:
        """The first argument, by position or by name."""
        return next(iter((*self.args, *self.kwargs.values())), None)


@dataclass(frozen=True, eq=False)
class LayerCall(Event):
    """How a model calls one of its decoder layers."""

    attention: AttentionCall


@dataclass(eq=False)
class ModelTrace:
    """One forward of a model."""

    layers: list[LayerCall] = field(default_factory=list)
    others: list[Event] = field(default_factory=list)
    """Calls of modules outside of its layers, in the order in which they returned."""


@dataclass(frozen=True, eq=False)
class LayerRun:
    """One forward of a layer in float32."""

    x: Tensor
    output: Any
    events: list[Event]
    """Calls of the modules within, in the order in which they returned."""
    attention: AttentionCall
    weights: dict[int, Tensor]
    """The parameters that it ran with, by the id of the layer's own."""
    kwargs: dict[str, Any]


def _random(shape: Sequence[int], like: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(len(shape))
    return torch.randn(*shape, generator=generator).to(like)


@contextmanager
def _hooked(modules: Iterable[nn.Module], events: list[Event]) -> Iterator[None]:
    def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        events.append(Event(module, args, kwargs, output))

    with ExitStack() as hooks:
        for module in modules:
            hooks.enter_context(module.register_forward_hook(note, with_kwargs=True))
        yield


def trace_model(
    model: PreTrainedModel, layers: dict[nn.Module, nn.Module], max_model_len: int | None
) -> ModelTrace:
    """Run a model on a few tokens at positions far apart."""
    from transformers import AttentionInterface

    AttentionInterface.register(TRACE, recorder(_random))
    trace, calls, events = ModelTrace(), [], []  # type: ignore[var-annotated]
    last = (max_model_len or 4096) - 1
    positions = torch.tensor([0, 1, 2, last // 3, last // 2, last], device=model.device)
    vocab_size = model.get_input_embeddings().num_embeddings
    token_ids = torch.arange(1, 1 + _NUM_TOKENS, device=model.device) * 7919 % vocab_size
    inside = {module for layer in layers for module in layer.modules()}
    outside = [module for module in model.modules() if module not in inside]
    slots = [(module, SLOT, calls) for module in layers.values()]
    with (
        driven(collect_configs(model), TRACE, slots),
        _hooked(layers, events),
        _hooked(outside, trace.others),
    ):
        model(
            input_ids=token_ids[None],
            position_ids=positions[None],
            use_cache=False,
            return_dict=True,
        )
    by_module = {call.module: call for call in calls}
    for event in events:
        attention = by_module[layers[event.module]]
        trace.layers.append(
            LayerCall(event.module, event.args, event.kwargs, event.output, attention)
        )
    return trace


def run_layer(model: PreTrainedModel, call: LayerCall, gain: float | None) -> LayerRun:
    """Run a layer alone, in float32, on random hidden states, its weights as they are or larger."""
    layer = call.module
    weights: dict[int, Tensor] = {}
    named: dict[str, Tensor] = dict(layer.named_parameters())
    for name, parameter in named.items():
        weights[id(parameter)] = named[name] = _amplify(parameter.detach().float(), gain)
    first, *args = call.args
    x = _random(first.shape, first.float()) * (gain or 1.0)
    kwargs = {name: _widen(value) for name, value in call.kwargs.items()}
    calls: list[AttentionCall] = []
    events: list[Event] = []
    inside = [module for module in layer.modules() if module is not layer]
    slots = [(call.attention.module, SLOT, calls)]
    with driven(collect_configs(model), TRACE, slots), _hooked(inside, events):
        output = functional_call(layer, named, (x, *map(_widen, args)), kwargs)
    (attention,) = calls
    return LayerRun(x, output, events, attention, weights, kwargs)


def _amplify(parameter: Tensor, gain: float | None) -> Tensor:
    if gain is None:
        return parameter
    if parameter.ndim < 2:  # with biases of 0 and norms of 1 a role would not show
        return parameter + 0.3 * _random(parameter.shape, parameter)
    length: Tensor = torch.linalg.vector_norm(parameter, dim=-1).mean().clamp_min(1e-20)
    return parameter * (gain / length)


def _widen(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.float()
    if isinstance(value, tuple):
        return tuple(map(_widen, value))
    return value
