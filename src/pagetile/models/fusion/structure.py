"""The role of each module of a decoder layer, found by its calls and checked by its results.

The formula, with optional parts in ``[]``::

    q, k, v = [bias +] products of [input_norm](x)
    h       = x + [post_attention_norm](o(attention([rope]([q_norm](q)), [rope]([k_norm](k)), v)))
    y       = x' = h + [post_mlp_norm](mlp([pre_mlp_norm](h)))
    mlp     = down(activation(gate(z)) * up(z)), or any module
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...fused.gated_activation import ACTIVATIONS, gated_activation
from ...fused.rms_norm import Norm, rms_norm
from ...fused.rotary_write import Heads
from ...fused.rotary_write.reference import project
from ..fused import read_norm
from ..linears import is_linear
from .trace import Event, LayerCall, LayerRun

_NEAR = 1e-4
"""Relative tolerance of float32 products in another order."""


class Mismatch(Exception):
    """A layer has another structure; the message says where it differs."""


@dataclass(frozen=True, eq=False)
class Mlp:
    """``down(activation(gate(z)) * up(z))``."""

    gate_up: tuple[nn.Module, ...]
    """The gate and up projections, or one module whose first rows are the gate's."""
    activation: str
    down: nn.Module


@dataclass(frozen=True, eq=False)
class Structure:
    """The modules of a decoder layer by their roles; ``None`` for those that it lacks."""

    layer: nn.Module
    attention: nn.Module
    heads: Heads
    has_angles: bool
    """Whether queries and keys are rotated by ``position_embeddings``."""
    qkv: tuple[nn.Module, ...]
    """The projections of queries, keys and values, or one for all three."""
    o: nn.Module
    mlp: Mlp | nn.Module
    input_norm: Norm | None
    post_attention_norm: Norm | None
    pre_mlp_norm: Norm | None
    post_mlp_norm: Norm | None
    returns_tuple: bool


def recognise(call: LayerCall, runs: Sequence[LayerRun]) -> Structure:
    """Return the structure of a layer.

    Raises:
        Mismatch: It has another structure.
    """
    return _Recogniser(call, runs).recognise()


class _Recogniser:
    def __init__(self, call: LayerCall, runs: Sequence[LayerRun]) -> None:
        self.call, self.runs, self.layer = call, runs, call.module
        self.attention = call.attention.module
        self.norms = {m: read_norm(m) for m in self.layer.modules()}

    def recognise(self) -> Structure:
        before, between, mlp, after = self._order_children()
        query, value = self.call.attention.query, self.call.attention.value
        sizes = query.shape[1], value.shape[1], query.shape[3], value.shape[3]
        xs = [run.x for run in self.runs]
        qkv, head_norms, o = self._order_attention(sizes)

        input_norm = before[0] if before else None
        zs = self._norm(input_norm, xs)
        self._check(zs, self._inputs(qkv[0]), "its attention's input")
        heads, has_angles = self._find_heads(qkv, head_norms, zs, sizes)
        outs = [run.attention.output.flatten(2) for run in self.runs]
        self._check(outs, self._inputs(o), "what comes between attention and its last product")
        outs = self._linear(o, outs)

        mlp_inputs = self._inputs(mlp)
        choices: list[tuple[Norm | None, Norm | None]]
        if len(between) == 2:
            choices = [(between[0], between[1])]
        else:
            choices = [(None, between[0]), (between[0], None)] if between else [(None, None)]
        for post, pre in choices:
            hs = [x + y for x, y in zip(xs, self._norm(post, outs), strict=True)]
            if self._agree(self._norm(pre, hs), mlp_inputs):
                break
        else:
            raise Mismatch("the input of its feed-forward layer has another formula")
        ys = [first_of(event.output) for event in self._events(mlp)]
        post_mlp = after[0] if after else None
        results = [h + y for h, y in zip(hs, self._norm(post_mlp, ys), strict=True)]
        outputs = [first_of(run.output) for run in self.runs]
        self._check(results, outputs, "its output")
        return Structure(
            self.layer, self.attention, heads, has_angles, qkv, o,
            self._find_mlp(mlp, mlp_inputs, ys) or mlp, input_norm, post, pre, post_mlp,
            returns_tuple=isinstance(self.call.output, tuple),
        )  # fmt: skip

    # --- roles by the order of calls ---------------------------------------------------------

    def _order_children(self) -> tuple[list[Norm], list[Norm], nn.Module, list[Norm]]:
        """Return the norms before, between and after attention and the feed-forward module."""
        groups: list[list[Norm]] = [[]]
        mlp = None
        children = set(self.layer.children())
        for event in self.runs[0].events:
            module = event.module
            if module not in children or not any(True for _ in module.parameters()):
                continue
            norm = self.norms[module]
            if norm is not None:
                groups[-1].append(norm)
                continue
            if len(groups) == 2:
                mlp = module
            elif self.attention not in set(module.modules()):
                raise Mismatch("attention is not the first of its parts")
            groups.append([])
        if mlp is None or len(groups) != 3:
            raise Mismatch("it is not attention and one feed-forward module")
        before, between, after = groups
        if len(before) > 1 or len(between) > 2 or len(after) > 1:
            raise Mismatch("it has more norms than are known")
        return before, between, mlp, after

    def _order_attention(
        self, sizes: tuple[int, ...]
    ) -> tuple[tuple[nn.Module, ...], list[Norm], nn.Module]:
        linears, norms = [], []
        inside = set(self.attention.modules())
        for event in self.runs[0].events:
            module = event.module
            has_weights = any(True for _ in module.parameters(recurse=False))
            if module is self.attention or module not in inside or not has_weights:
                continue
            norm = self.norms[module]
            if norm is not None:
                norms.append(norm)
            elif is_linear(module):
                linears.append(module)
            else:
                raise Mismatch(f"its attention runs a {type(module).__name__}")
        *qkv, o = linears or [nn.Identity()]
        num_heads, num_kv_heads, size, v_size = sizes
        expected = [num_heads * size, num_kv_heads * size, num_kv_heads * v_size]
        widths = [_weight(module).shape[0] for module in qkv]
        if not qkv or widths not in (expected, [sum(expected)]):
            raise Mismatch(f"the products of its attention give {widths}, expected {expected}")
        if any(len(norm.weight) != size for norm in norms) or len(norms) not in (0, 2):
            raise Mismatch("the norms of its attention are not of heads")
        return tuple(qkv), norms, o

    # --- formulas ----------------------------------------------------------------------------

    def _find_heads(
        self,
        qkv: tuple[nn.Module, ...],
        norms: list[Norm],
        zs: list[Tensor],
        sizes: tuple[int, int, int, int],
    ) -> tuple[Heads, bool]:
        rows = [torch.cat(parts, -1)[0] for parts in zip(*(self._linear(m, zs) for m in qkv),
                                                         strict=True)]  # fmt: skip
        for has_angles, is_shared in ((True, False), (True, True), (False, False)):
            with_angles = [self._angles(run) if has_angles else (None, None) for run in self.runs]
            agrees = True
            for run, row, (cos, sin) in zip(self.runs, rows, with_angles, strict=True):
                if has_angles and (cos is None or cos.shape[-1] * (1 + is_shared) > sizes[2]):
                    agrees = False
                    break
                q_norm, k_norm = (_with_weight(run, n) for n in norms or (None, None))
                heads = Heads(*sizes, q_norm, k_norm, is_shared)
                found = project(row, cos, sin, heads)
                given = run.attention.query, run.attention.key, run.attention.value
                agrees &= all(
                    _is_near(computed, own[0].transpose(0, 1))
                    for computed, own in zip(found, given, strict=True)
                )
            if agrees:
                q_norm, k_norm = norms or (None, None)
                return Heads(*sizes, q_norm, k_norm, is_shared), has_angles
        raise Mismatch("its queries, keys or values have another formula")

    @staticmethod
    def _angles(run: LayerRun) -> tuple[Tensor | None, Tensor | None]:
        found = run.kwargs.get("position_embeddings")
        is_pair = isinstance(found, tuple) and len(found) == 2
        return found if is_pair else (None, None)  # type: ignore[return-value]

    def _find_mlp(self, mlp: nn.Module, zs: list[Tensor], ys: list[Tensor]) -> Mlp | None:
        """Return the roles within a feed-forward module; ``None`` if it has another structure."""
        inside = [m for m in mlp.modules() if any(True for _ in m.parameters(recurse=False))]
        called = [event.module for event in self.runs[0].events if event.module in set(inside)]
        if (
            len(called) != len(inside)
            or len(called) not in (2, 3)
            or not all(map(is_linear, called))
        ):
            return None
        *gate_up, down = called
        if len({len(_weight(module)) for module in gate_up}) != 1:
            return None
        for order in (gate_up, gate_up[::-1]):
            rows = [torch.cat(parts, -1) for parts in zip(*(self._linear(m, zs) for m in order),
                                                          strict=True)]  # fmt: skip
            if rows[0].shape[-1] != 2 * _weight(down).shape[1]:
                return None
            for activation in ACTIVATIONS:
                gated = [gated_activation(row, activation, impl="reference") for row in rows]
                if self._agree(gated, self._inputs(down)) and self._agree(
                    self._linear(down, gated), ys
                ):
                    return Mlp(tuple(order), activation, down)
        return None

    def _norm(self, norm: Norm | None, xs: list[Tensor]) -> list[Tensor]:
        if norm is None:
            return xs
        found = []
        for run, x in zip(self.runs, xs, strict=True):
            weight = run.weights[id(norm.weight)]
            if weight.shape != x.shape[-1:]:
                raise Mismatch("a norm is of another width")
            found.append(rms_norm(x, weight, eps=norm.eps, kind=norm.kind, impl="reference"))
        return found

    def _linear(self, module: nn.Module, xs: list[Tensor]) -> list[Tensor]:
        found = []
        for run, x in zip(self.runs, xs, strict=True):
            bias = getattr(module, "bias", None)
            if _weight(module).shape[1] != x.shape[-1]:
                raise Mismatch("a product is of another width")
            found.append(
                functional.linear(
                    x, run.weights[id(module.weight)],
                    None if bias is None else run.weights[id(bias)],
                )
            )  # fmt: skip
        return found

    # --- what was noted ----------------------------------------------------------------------

    def _events(self, module: nn.Module) -> list[Event]:
        found = [[e for e in run.events if e.module is module] for run in self.runs]
        if any(len(events) != 1 for events in found):
            raise Mismatch(f"it runs a {type(module).__name__} several times")
        return [event for (event,) in found]

    def _inputs(self, module: nn.Module) -> list[Tensor]:
        return [event.input for event in self._events(module)]

    @staticmethod
    def _agree(computed: Iterable[Tensor], own: Iterable[Any]) -> bool:
        return all(_is_near(a, b) for a, b in zip(computed, own, strict=True))

    def _check(self, computed: Iterable[Tensor], own: Iterable[Any], what: str) -> None:
        if not self._agree(computed, own):
            raise Mismatch(f"{what} has another formula")


def _weight(module: nn.Module) -> Tensor:
    return module.weight  # type: ignore[return-value]


def _with_weight(run: LayerRun, norm: Norm | None) -> Norm | None:
    return None if norm is None else norm._replace(weight=run.weights[id(norm.weight)])


def first_of(output: Any) -> Any:
    """Return a module's result, or the first of several."""
    return output[0] if isinstance(output, tuple) else output


def _is_near(computed: Tensor, own: Any) -> bool:
    if not isinstance(own, Tensor) or own.shape != computed.shape:
        return False
    difference = float((own.double() - computed.double()).norm())
    return difference <= _NEAR * float(computed.double().norm())
