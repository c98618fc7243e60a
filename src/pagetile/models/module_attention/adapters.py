"""Makes attention modules call Transformers' attention interface for the length of a step.

Five families of Transformers compute attention in their modules (``families``). One method of each
module is replaced by ``driven``; the replacement calls the attention function that the model's
config names, so the probe and paged attention treat these modules as all others::

    BloomAttention.forward  ->  q, k, v as the module makes them
                                ALL_ATTENTION_FUNCTIONS["pagetile"](module, q, k, v, ...)
                                output as the module projects it

A replacement is used only if, with dense attention, its output equals that of the module's own
forward on the inputs that the model passes to the module.
"""

from __future__ import annotations

from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...errors import UnsupportedError
from ...tiles.eager import attend as attend_dense
from ..attention import NAME, collect_configs, driven
from ..fused import Replacement
from .bias import KeyBias, fit_bias
from .families import Attention, Family, find_family

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_MOST_KEYS = 8192
"""The largest number of positions at which a bias is compared with its slopes."""
_USUAL_KEYS = 2048
"""The number of positions of that comparison for a model without a limit."""
_NUM_TOKENS = {4: 300, 8: 300, 2: 14}
"""Tokens of the comparison by bytes of an element.

Enough for GPT-Neo's window of 256 and for a bias that bfloat16 rounds. Few in 16-bit types, because
BLOOM rounds its bias to them, and the error grows with the key's distance.
"""
_TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.1}


def find_reference(model: PreTrainedModel) -> str:
    """Return the implementation of a model's own attention to compare its logits with.

    Falcon with ALiBi adds its bias twice under "eager" and once under "sdpa". A model with adapters
    is compared with the implementation that it is set to, every other model with "eager".
    """
    if any(find_family(module) for module in model.modules()):
        return model.config._attn_implementation or "eager"
    return "eager"


@torch.no_grad()
def find_adapters(model: PreTrainedModel, max_model_len: int | None) -> list[Replacement]:
    """Return the replacements that make a model's attention modules call the interface.

    Args:
        model: Any model; there are no replacements if its modules call the interface already.
        max_model_len: The number of positions that will be used; ``None`` if there is no limit.

    Raises:
        UnsupportedError: A module does not compute what its replacement does.
    """
    found = [(m, family) for m in model.modules() if (family := find_family(m)) is not None]
    if not found:
        return []
    inputs = _placeholders(model, found)
    length = min(max_model_len or _USUAL_KEYS, _MOST_KEYS)
    bias = _read_bias(model, found, inputs, length)
    _compare(model, found, bias, max_model_len)
    call = _interface(model.config)
    return [*((m, family.method, family.make(m, call, bias)) for m, family in found), *inputs]


def _interface(config: PreTrainedConfig) -> Attention:
    """Return the attention function that a config names at the time of the call."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def call(*arguments: Any, **options: Any) -> tuple[Tensor, Any]:
        function = ALL_ATTENTION_FUNCTIONS[config._attn_implementation]
        return function(*arguments, **options)  # type: ignore[no-any-return]

    return call


def _placeholders(
    model: PreTrainedModel, found: list[tuple[nn.Module, Family]]
) -> list[Replacement]:
    """Return a mask argument for models that fail without one. It hides nothing.

    Transformers passes a mask of four dimensions on unchanged.
    """
    if not any(family.needs_mask for _, family in found):
        return []
    base = model.base_model
    own = base.forward
    placeholder = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=model.device)

    def forward(*arguments: Any, attention_mask: Any = None, **options: Any) -> Any:
        mask = placeholder if attention_mask is None else attention_mask
        return own(*arguments, attention_mask=mask, **options)

    return [(base, "forward", forward)]


class _Seen(Exception):
    """Ends a forward as soon as the first attention module was called."""


def _read_bias(
    model: PreTrainedModel,
    found: list[tuple[nn.Module, Family]],
    inputs: list[Replacement],
    length: int,
) -> KeyBias | None:
    """Return the bias that a model passes to its attention modules for ``length`` keys."""
    module, family = found[0]
    if family.bias is None:
        return None
    seen: dict[str, Any] = {}

    def look(module: nn.Module, arguments: Any, options: dict[str, Any]) -> None:
        seen.update(options)
        raise _Seen

    token_ids = torch.zeros(1, length, dtype=torch.int64, device=model.device)
    hook = module.register_forward_pre_hook(look, with_kwargs=True)
    # Driven by our name, a model makes no mask of length².
    with hook, suppress(_Seen), driven(collect_configs(model), NAME, inputs):
        model(input_ids=token_ids, use_cache=False)
    bias = seen.get(family.bias)
    if bias is None:
        return None
    num_heads = getattr(module, "num_heads", None) or module.n_heads
    fitted = fit_bias(bias.reshape(num_heads, -1))
    if family.bias == "alibi" and find_reference(model) == "eager" and _adds_twice(module):
        fitted = KeyBias(2 * fitted.slopes)
    return fitted


def _adds_twice(module: nn.Module) -> bool:
    """Return whether a model adds the bias to its mask as well, as Falcon's does in "eager"."""
    return hasattr(module, "new_decoder_architecture")


def _compare(
    model: PreTrainedModel,
    found: list[tuple[nn.Module, Family]],
    bias: KeyBias | None,
    max_model_len: int | None,
) -> None:
    """Raise UnsupportedError unless every replacement gives its module's own output."""
    names = {module: name for name, module in model.named_modules()}
    num_tokens = min(_NUM_TOKENS[model.dtype.itemsize], max_model_len or _USUAL_KEYS)
    vocab_size = model.get_input_embeddings().num_embeddings
    token_ids = torch.arange(1, num_tokens + 1, device=model.device) * 7919 % vocab_size
    families, tolerance = dict(found), _TOLERANCES[model.dtype]

    def compare(module: nn.Module, arguments: Any, options: dict[str, Any], output: Any) -> None:
        family = families[module]
        vars(module)[family.method] = family.make(module, _attend_densely, bias)
        try:
            made = module.forward(*arguments, **options)[0]
        finally:
            del vars(module)[family.method]
        own = output[0].float()
        error = float((made.float() - own).norm() / own.norm().clamp_min(1e-30))
        if not error <= tolerance:  # NaN, too
            raise UnsupportedError(
                f"layer {names[module]!r} does not compute what {type(module).__name__} of "
                f"Transformers does (relative error {error:.1e}, at most {tolerance:.1e} "
                "expected)"
            )

    with ExitStack() as hooks:
        for module in families:
            hooks.enter_context(module.register_forward_hook(compare, with_kwargs=True))
        with driven(collect_configs(model), find_reference(model)):
            model(input_ids=token_ids[None], use_cache=False)


def _attend_densely(
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    *,
    scaling: float,
    sliding_window: int | None = None,
    alibi_slopes: Tensor | None = None,
) -> tuple[Tensor, None]:
    """Causal attention of one sequence; the mask is the model's own and says the same."""
    parts = (part.squeeze(0).transpose(0, 1).float() for part in (q, k, v))
    out, _ = attend_dense(
        *parts,
        softmax_scale=scaling,
        causal=True,
        sliding_window=sliding_window,
        alibi_slopes=alibi_slopes,
    )
    return out[None].to(v.dtype), None
