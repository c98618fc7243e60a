"""Block-sparse attention beside dense and FlexAttention: ``python benchmarks/block_sparse.py``.

One bf16 sequence of 16384 tokens, 16 heads of 128, a random eighth of 128 × 128 blocks. Prints
microseconds (median of CUDA-graph replays) and errors against float32 scores of a few rows.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from pagetile import BlockMask, UnsupportedError, attention

LENGTH, HEADS, SIZE = 16384, 16, 128


def time_call(call: Callable[[], Any], repeats: int = 20) -> float:
    """Median microseconds of a CUDA-graph replay."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000)
    return float(statistics.median(times))


def error_of(
    out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: BlockMask
) -> float:
    """The largest error of 64 random rows, against float64."""
    worst = 0.0
    for row in torch.randint(0, LENGTH, (64,)).tolist():
        visible = mask.mask[0, :, row // mask.block_q].repeat_interleave(mask.block_k, dim=-1)
        scores = torch.einsum("hd,khd->hk", q[0, row].double(), k[0].double()) * SIZE**-0.5
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1).nan_to_num()
        expected = torch.einsum("hk,khd->hd", weights, v[0].double())
        worst = max(worst, float((out[0, row].double() - expected).abs().max()))
    return worst


def main() -> None:
    """Time forward, then forward and backward."""
    torch.manual_seed(0)
    print(torch.cuda.get_device_name(), torch.__version__)
    make = {"dtype": torch.bfloat16, "device": "cuda"}
    q, k, v = (torch.randn(1, LENGTH, HEADS, SIZE, **make) for _ in range(3))  # type: ignore[call-overload]
    blocks = LENGTH // 128
    mask = BlockMask(torch.rand(1, HEADS, blocks, blocks, device="cuda") < 0.125)
    dense = time_call(lambda: attention(q, k, v))
    print(f"dense forward {dense:.0f} us")
    for impl in ("hopper", "triton"):
        try:
            out = attention(q, k, v, block_mask=mask, impl=impl).out
        except UnsupportedError as reason:
            print(reason)
            continue
        took = time_call(lambda impl=impl: attention(q, k, v, block_mask=mask, impl=impl))  # type: ignore[misc]
        error = error_of(out, q, k, v, mask)
        print(f"{impl} forward {took:.0f} us, {dense / took:.2f} x dense, error {error:.2g}")
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]

    def step(**options: Any) -> None:
        torch.autograd.grad(attention(*leaves, **options).out, leaves, q)

    both = time_call(step, 10), time_call(lambda: step(block_mask=mask), 10)
    print(f"forward and backward: dense {both[0]:.0f} us, sparse {both[1]:.0f} us")

    from torch.nn.attention.flex_attention import BlockMask as FlexMask
    from torch.nn.attention.flex_attention import flex_attention

    flex: Any = torch.compile(flex_attention)
    visible = mask.mask.int()
    flex_mask = FlexMask.from_kv_blocks(
        torch.zeros_like(visible[..., 0]), visible.argsort(dim=-1).int(),
        visible.sum(dim=-1).int(), visible.argsort(dim=-1, descending=True, stable=True).int(),
        BLOCK_SIZE=128,
    )  # fmt: skip
    turned = [t.transpose(1, 2).contiguous() for t in (q, k, v)]
    out = flex(*turned, block_mask=flex_mask)
    error = error_of(out.transpose(1, 2), q, k, v, mask)
    took = time_call(lambda: flex(*turned, block_mask=flex_mask))
    print(f"FlexAttention forward {took:.0f} us, error {error:.2g}")


if __name__ == "__main__":
    main()
