"""The fused forward of a recognised decoder layer.

Launches of a step of 1 or 2 tokens, on a Hopper GPU of up to 16, and of any other step::

    [norm + q k v]  rotate + write  attention  [o + residual]  [norm + gate up + act]  [down + res.]
    q k v  rotate + write  attention  o  [add + norm]  gate up  act  down  [add + norm of the next]

Up to 64 tokens the activation is part of the gate's product. On a CPU every
step is like the last line.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from ...device import DeviceInfo
from ...errors import PagetileError
from ...fused.add_norm import add_norm
from ...fused.gated_activation import gated_activation
from ...fused.rms_norm import Norm, rms_norm
from ...fused.rotary_write import rotate_and_write
from ...fused.small_linear import (
    Problem,
    is_faster,
    is_faster_in_parts,
    is_faster_in_parts_on_hopper,
    is_faster_in_ring,
    is_faster_on_cpu,
    is_resident,
    partial_products,
    small_linear,
)
from ...ops.paged_attention import paged_attention
from ..attention import AttentionLayer
from .structure import Mlp, Structure
from .weights import Product, merge


class Link:
    """Hidden states between two layers, with their norm, computed by the first layer."""

    __slots__ = ("hidden", "norm", "normed")

    def __init__(self, norm: Norm | None) -> None:
        self.norm = norm
        self.hidden: Tensor | None = None
        self.normed: Tensor | None = None

    def take(self, hidden: Tensor) -> Tensor | None:
        """Return the norm of these hidden states if it is known, and forget it."""
        normed = self.normed if self.hidden is hidden else None
        self.hidden = self.normed = None
        return normed


class Watch:
    """Modules that a fused layer does not call, and their state when it was loaded.

    Args:
        modules: The modules, and the ``forward`` that each has during a step.
    """

    def __init__(self, modules: list[tuple[nn.Module, object]]) -> None:
        self._modules = modules
        self._weights = [
            (module._parameters, name, parameter)
            for module, _ in modules
            for name, parameter in module._parameters.items()
            if parameter is not None
        ]
        # Merged parameters are views; a module's ``to`` replaces their memory.
        self._addresses = [
            (parameter, parameter.data_ptr())
            for _, _, parameter in self._weights
            if parameter.untyped_storage().nbytes() > parameter.nbytes
        ]

    def is_as_before(self) -> bool:
        """Return whether the modules are unchanged and have no hooks."""
        for module, forward in self._modules:
            own = module.__dict__
            if own.get("forward") is not forward:
                return False
            if own["_forward_hooks"] or own["_forward_pre_hooks"]:
                return False
        for parameters, name, parameter in self._weights:
            if parameters.get(name) is not parameter:
                return False
        return all(parameter.data_ptr() == address for parameter, address in self._addresses)


class FusedLayer:
    """Fused forward of a recognised decoder layer.

    Args:
        structure: The layer's structure.
        attention: Its attention module, with the cache and the step.
        options: The layer's arguments of ``paged_attention``.
        kwargs: Names of the arguments that its model calls it with.
        impl: The implementation of the fused operations.
    """

    def __init__(
        self,
        structure: Structure,
        attention: AttentionLayer,
        options: dict[str, Any],
        kwargs: frozenset[str],
        impl: str,
    ) -> None:
        self.structure, self.attention, self.impl = structure, attention, impl
        self._options, self._kwargs = options, kwargs
        self._own = type(structure.layer).forward
        self.qkv, self.o = merge(structure.qkv), merge([structure.o])
        self.gate_up: Product | None = None
        self.down: Product | None = None
        if isinstance(structure.mlp, Mlp):
            self.gate_up = merge(structure.mlp.gate_up)
            self.down = merge([structure.mlp.down])
        self.watch = Watch([])
        self.before, self.after = Link(structure.input_norm), Link(None)

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the layer; by its own code if anything differs from when it was recognised."""
        layer = self.structure.layer
        normed = self.before.take(hidden)
        if (
            not args
            and self.attention.step is not None
            and kwargs.keys() == self._kwargs
            and kwargs.get("attention_mask") is None
            and kwargs.get("past_key_values") is None
            and self.watch.is_as_before()
        ):
            try:
                out = self._run(hidden, normed, kwargs)
            except PagetileError:  # not supported: run the layer's own code
                pass
            else:
                return (out,) if self.structure.returns_tuple else out
        return self._own(layer, hidden, *args, **kwargs)

    def _run(self, hidden: Tensor, normed: Tensor | None, kwargs: dict[str, Any]) -> Tensor:
        structure = self.structure
        x = hidden[0]
        out = self._attend(x, normed, kwargs)
        post, pre = structure.post_attention_norm, structure.pre_mlp_norm
        activation = structure.mlp.activation if isinstance(structure.mlp, Mlp) else ""
        is_taken = self._takes_norm(x, self.gate_up or self.qkv, activation)
        y, normed = self._add(x, out, self.o, post, pre, is_taken)

        if self.gate_up is not None and self.down is not None:
            out = self._product(self.gate_up, y, normed, pre, activation)
            down = self.down
        else:
            assert isinstance(structure.mlp, nn.Module)
            if normed is None:
                normed = y if pre is None else self._norm(y, pre)
            found = structure.mlp(normed[None])
            out, down = (found[0] if isinstance(found, tuple) else found)[0], None
        post, following = structure.post_mlp_norm, self.after
        is_taken = self._takes_norm(x, self.qkv)  # the next layer is like this one
        y, normed = self._add(y, out, down, post, following.norm, is_taken)
        result = y[None]
        if normed is not None:
            following.hidden, following.normed = result, normed
        return result

    def _attend(self, x: Tensor, normed: Tensor | None, kwargs: dict[str, Any]) -> Tensor:
        """Return attention before its last product, ``[num_tokens, num_heads * v_head_size]``."""
        structure, attention = self.structure, self.attention
        step, k_cache, v_cache = attention.step, attention.k_cache, attention.v_cache
        assert step is not None
        assert k_cache is not None
        assert v_cache is not None
        cos = sin = None
        if structure.has_angles:
            cos, sin = kwargs["position_embeddings"]
        qkv = self._product(self.qkv, x, normed, structure.input_norm)
        scales: dict[str, Any] = {"k_scale": attention.k_scale, "v_scale": attention.v_scale}
        q = rotate_and_write(
            qkv, cos, sin, structure.heads, k_cache, v_cache, step.slot_mapping, **scales,
            impl=self.impl,
        )  # fmt: skip
        out, _ = paged_attention(q, k_cache, v_cache, step.batch, **self._options, **scales)
        return out.flatten(1)

    def _choose(
        self, x: Tensor, product: Product, activation: str = "", *, has_norm: bool = False
    ) -> str:
        """Return the implementation of ``small_linear``; ``""``: torch's product is faster."""
        (rows, size), is_gated = product.weight.shape, bool(activation)
        problem = Problem(len(x), size, rows // (1 + is_gated), x.dtype, is_gated, has_norm)
        if self.impl == "cpu":  # a norm is computed with the sum before it
            return "cpu" if is_faster_on_cpu(problem) and not has_norm else ""
        device = DeviceInfo.of(x.device)
        if is_resident(problem, device):
            return "hopper"
        is_plain = not has_norm and product.weight.data_ptr() % 16 == 0
        if is_plain and is_faster_in_ring(problem, device):
            return "hopper_ring"
        return self.impl if is_faster(problem) else ""

    def _choose_for_parts(self, x: Tensor, product: Product) -> str:
        """Return the implementation of ``partial_products``; ``""``: one product is faster."""
        if product.bias is not None or self.impl == "cpu":
            return ""
        rows, size = product.weight.shape
        problem = Problem(len(x), size, rows, x.dtype)
        is_aligned = product.weight.data_ptr() % 16 == 0
        if is_aligned and is_faster_in_parts_on_hopper(problem, DeviceInfo.of(x.device)):
            return "hopper_ring"
        return self.impl if is_faster_in_parts(problem) else ""

    def _takes_norm(self, x: Tensor, product: Product, activation: str = "") -> bool:
        """Return whether a product computes the norm before it."""
        return bool(self._choose(x, product, activation, has_norm=True))

    def _product(
        self, product: Product, x: Tensor, normed: Tensor | None, norm: Norm | None,
        activation: str = "",
    ) -> Tensor:  # fmt: skip
        """``activation(norm(x) @ weight.T + bias)``."""
        options: dict[str, Any] = {"bias": product.bias, "activation": activation}
        if normed is None and norm is not None:
            impl = self._choose(x, product, activation, has_norm=True)
            if impl:
                return small_linear(x, product.weight, norm=norm, **options, impl=impl)
            normed = self._norm(x, norm)
        x = x if normed is None else normed
        impl = self._choose(x, product, activation)
        if impl:
            return small_linear(x, product.weight, **options, impl=impl)
        y = functional.linear(x, product.weight, product.bias)
        return gated_activation(y, activation, impl=self.impl) if activation else y

    def _add(
        self, residual: Tensor, x: Tensor, product: Product | None, post: Norm | None,
        following: Norm | None, is_taken: bool,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Return ``residual + post(product(x))``, with its norm unless the next product has it."""
        if product is not None:
            impl = self._choose(x, product) if post is None and is_taken else ""
            if impl:
                weight, bias = product.weight, product.bias
                return small_linear(x, weight, bias=bias, residual=residual, impl=impl), None
            impl = self._choose_for_parts(x, product)
            if impl:
                x = partial_products(x, product.weight, impl=impl)
            else:
                x = self._product(product, x, None, None)
        return add_norm(
            residual, x, before=post, after=None if is_taken else following, impl=self.impl
        )

    def _norm(self, x: Tensor, norm: Norm) -> Tensor:
        return rms_norm(x, norm.weight, eps=norm.eps, kind=norm.kind, impl=self.impl)
