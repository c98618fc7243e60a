"""Small calls of the GPU kernels, for tools such as compute-sanitizer.

    compute-sanitizer --tool memcheck python tools/small_calls.py
    compute-sanitizer --tool racecheck python tools/small_calls.py decode prefill

Every result is compared with the reference; exits with 1 if one is wrong.
"""

import argparse
import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pagetile import (
    attention,
    attention_scores,
    copy_blocks,
    merge_states,
    rel_offsets,
    shift_regions,
    window_attention,
    write_kv,
)
from pagetile.testing import PagedCase, compare, make_inputs
from pagetile.tiles.state import AttentionOutput

LONG: dict[str, Any] = {"query_lens": (1, 1, 1), "seq_lens": (150, 700, 33)}
SEVERAL: dict[str, Any] = {"query_lens": (70, 130), "seq_lens": (70, 150)}
LONGER: dict[str, Any] = {"query_lens": (70, 130), "seq_lens": (400, 600), "sliding_window": 300}
BENT: dict[str, Any] = {"logits_soft_cap": 30.0, "has_alibi": True, "has_sinks": True}
PAGED = {
    "decode": ("hopper", LONG),
    "decode-8-bit": ("hopper", LONG | {"kv_dtype": torch.float8_e4m3fn, "scales": "token"}),
    "decode-triton": ("triton", LONG),
    "prefill": ("hopper_prefill", SEVERAL),
    "prefill-narrow": ("hopper_prefill", SEVERAL | {"head_size": 64}),
    "prefill-wide": ("hopper_prefill", LONGER | {"head_size": 256}),
    "prefill-in-parts": ("hopper_prefill", SEVERAL | {"head_size": 80, "block_size": 64}),
    "prefill-gathering": ("hopper_prefill", SEVERAL | {"block_size": 1}),
    "prefill-gathering-parts": ("hopper_prefill", SEVERAL | {"head_size": 96}),
    "prefill-narrow-values": ("hopper_prefill", SEVERAL | {"head_size": 192, "v_head_size": 128}),
    "prefill-8-bit": (
        "hopper_prefill",
        SEVERAL | {"kv_dtype": torch.float8_e4m3fn, "scales": "head"},
    ),
    "prefill-8-bit-token": (
        "hopper_prefill",
        SEVERAL | {"kv_dtype": torch.int8, "scales": "token", "head_size": 64},
    ),
    "prefill-bent": ("hopper_prefill", SEVERAL | BENT),
    "prefill-bent-wide": ("hopper_prefill", LONGER | BENT | {"head_size": 256}),
    "mixed": ("hopper_prefill", {"query_lens": (70, 1, 3), "seq_lens": (150, 700, 33)}),
    "prefill-divided": ("hopper_prefill", {"query_lens": (70, 1), "seq_lens": (5000, 33)}),
    "prefill-triton": ("triton", SEVERAL),
}


def paged(name: str) -> float:
    """Relative to the tolerance: the error of ``paged_attention`` on poisoned inputs."""
    impl, sizes = PAGED[name]
    plain: dict[str, Any] = {
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_size": 128,
        "dtype": torch.bfloat16,
    }
    inputs = make_inputs(PagedCase(**(plain | sizes)))
    there = inputs.to("cuda")
    out = there.attend(impl=impl, out=torch.full_like(there.out, torch.nan))
    return compare(AttentionOutput(*(x.cpu() for x in out)), inputs).ratio


def dense(impl: str) -> float:
    """The same for ``attention`` and its gradients."""
    q, k, v, dout = _random(4, 2, 150, 4, 128)
    return _against_reference(attention, (q, k, v), dout, impl, causal=True)


def windows(axes: int, impl: str) -> float:
    """The same for ``window_attention`` with bias and regions, and its gradients."""
    window = [7] * axes
    q, k, v, dout = _random(4, 8, 3, 7**axes, 16)
    table = torch.randn(13**axes, 3, device="cuda").requires_grad_()
    regions = shift_regions([14] * axes, window, [3] * axes)
    return _against_reference(
        window_attention, (q, k, v), dout, impl,
        bias_table=table, rel_offsets=rel_offsets(window).cuda(),
        regions=regions.cuda(),
    )  # fmt: skip


def scores(k_len: int) -> float:
    """The same for ``attention_scores``."""
    (q,), (k,) = _random(1, 2, 3, 49, 16), _random(1, 2, 3, k_len, 16)
    return _distance(attention_scores(q, k), attention_scores(q, k, impl="reference"))


def states() -> float:
    """The same for ``merge_states``."""
    outs, lses = _random(1, 3, 20, 4, 64)[0], torch.randn(3, 20, 4, device="cuda")
    return _distance(merge_states(outs, lses).out, merge_states(outs, lses, impl="reference").out)


def caches() -> float:
    """The same for ``write_kv`` into 8 bits, then ``copy_blocks``."""
    k, v = _random(2, 40, 2, 64)
    slots = torch.randperm(64, device="cuda")[:40]
    scale = torch.ones(2, device="cuda")
    found = []
    for impl in ("auto", "reference"):
        cache = torch.zeros(2, 6, 16, 2, 64, device="cuda").to(torch.float8_e4m3fn)
        write_kv(k, v, cache[0], cache[1], slots, k_scale=scale, v_scale=scale, impl=impl)
        copy_blocks([cache[0]], torch.tensor([[0, 4], [1, 5]]), impl=impl)
        found.append(cache.float())
    return _distance(*found)


CALLS: dict[str, Callable[[], float]] = {
    **{name: lambda name=name: paged(name) for name in PAGED},  # type: ignore[misc]
    "attention": lambda: dense("hopper"),
    "attention-triton": lambda: dense("triton"),
    "windows": lambda: windows(3, "hopper"),
    "windows-one-tile": lambda: windows(2, "hopper"),
    "windows-triton": lambda: windows(2, "triton"),
    "scores": lambda: scores(49),
    "scores-343": lambda: scores(343),
    "scores-long": lambda: scores(1001),
    "merge": states,
    "caches": caches,
}


def main() -> int:
    """Make the calls; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CALLS)}")
    names = parser.parse_args().names or list(CALLS)
    if unknown := set(names) - set(CALLS):
        parser.error(f"{', '.join(sorted(unknown))} is none of {', '.join(CALLS)}")
    torch.manual_seed(0)
    worst = 0.0
    for name in names:
        worst = max(worst, part := CALLS[name]())
        print(f"{name:16} {part:.3f} of what is allowed", flush=True)
    return 0 if worst <= 1 else 1


def _random(count: int, *shape: int) -> tuple[Tensor, ...]:
    return torch.randn(count, *shape, dtype=torch.bfloat16, device="cuda").unbind(0)


def _against_reference(
    op: Callable[..., AttentionOutput], qkv: tuple[Tensor, ...], dout: Tensor, impl: str,
    **others: Any,
) -> float:  # fmt: skip
    """The largest error of results and gradients, relative to what is allowed."""
    found = []
    for chosen in (impl, "reference"):
        leaves = [x.detach().clone().requires_grad_() for x in qkv]
        out, lse = op(*leaves, **others, impl=chosen)
        leaves += [x for x in others.values() if isinstance(x, Tensor) and x.requires_grad]
        gradients = torch.autograd.grad([out, lse], leaves, [dout, torch.ones_like(lse)])
        found.append([out.detach(), lse.detach(), *gradients])
    return max(_distance(*pair) for pair in zip(*found, strict=True))


def _distance(found: Tensor, expected: Tensor) -> float:
    """The error relative to 2 % of the largest number: bfloat16 rounds to 0.4 %."""
    gap = float((found.double() - expected.double()).abs().max() / expected.double().abs().max())
    return gap / 0.02 if math.isfinite(gap) else math.inf


if __name__ == "__main__":
    sys.exit(main())
