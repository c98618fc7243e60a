"""Time one decode forward of a model with random weights, and list its kernels.

``python tools/decode_forward.py [--sizes qwen3-0.6b|llama-8b-4] [--rows 1 8 64 256] [--kernels]``

A forward is captured as a CUDA graph and replayed; its lower bound is the bytes of weights and keys
over the read bandwidth in the same run. ``llama-8b-4`` has four of Llama-8B's layers and a small
head.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import statistics
from typing import Any

import torch

from pagetile.kv_cache import BlockPool
from pagetile.kv_cache.storage import KVCache
from pagetile.models import ForwardBatch, PagedModel, load_model
from pagetile.ops.paged_attention import PagedBatch

_COMMON: dict[str, Any] = {"max_position_embeddings": 4096, "bos_token_id": 1, "eos_token_id": 2}
SIZES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "head_dim": 128,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
        "vocab_size": 151936, "tie_word_embeddings": True,
    },
    "llama-8b-4": {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 4, "num_attention_heads": 32, "num_key_value_heads": 8,
        "vocab_size": 1024, "tie_word_embeddings": False,
    },
}  # fmt: skip
BLOCK_SIZE, NUM_KEYS = 16, 512


def build(name: str) -> PagedModel:
    """A model of these sizes with random bfloat16 weights, on the GPU."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**{**_COMMON, **SIZES[name]})
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return load_model(model, max_model_len=2048)


def make_step(num_seqs: int) -> ForwardBatch:
    """One new token of each sequence, the last of ``NUM_KEYS``, in blocks in random order."""
    width = NUM_KEYS // BLOCK_SIZE
    blocks = torch.randperm(num_seqs * width, generator=torch.Generator().manual_seed(0))
    tables = blocks.view(num_seqs, width).to("cuda", torch.int32)
    lengths = torch.full((num_seqs,), NUM_KEYS, dtype=torch.int32, device="cuda")
    return ForwardBatch(
        token_ids=torch.arange(num_seqs, device="cuda"),
        positions=lengths.long() - 1,
        batch=PagedBatch.decode(tables, lengths, NUM_KEYS),
        slot_mapping=tables[:, -1].long() * BLOCK_SIZE + BLOCK_SIZE - 1,
        logits_rows=torch.arange(num_seqs, device="cuda"),
    )


def capture(model: PagedModel, step: ForwardBatch) -> torch.cuda.CUDAGraph:
    """The forward as a graph."""
    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        for _ in range(2):
            model.forward(step)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model.forward(step)
    return graph


def milliseconds(run: Any, repeats: int = 10) -> float:
    """The median time of a call, by events."""
    run()
    run()
    make: Any = torch.cuda.Event
    events = [make(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    torch.cuda.synchronize()
    times = [float(a.elapsed_time(b)) for a, b in itertools.pairwise(events)]
    return statistics.median(times)


def list_kernels(graph: torch.cuda.CUDAGraph) -> None:
    """Print the kernels of a replay; the time of a kernel that starts early includes its wait."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        graph.replay()
        torch.cuda.synchronize()
    found: dict[str, list[float]] = collections.defaultdict(list)
    for event in profile.events():
        found[event.name].append(event.time_range.elapsed_us())
    for name, times in sorted(found.items(), key=lambda item: -sum(item[1]))[:12]:
        print(f"    {len(times):4d} x {statistics.mean(times):7.2f} us  {name[:90]}")


def main() -> None:
    """Build, time and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sizes", choices=SIZES, default="qwen3-0.6b")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--kernels", action="store_true")
    options = parser.parse_args()
    numbers = torch.zeros(1 << 30, device="cuda")
    rate = numbers.nbytes / milliseconds(numbers.sum)  # bytes a millisecond
    del numbers
    model = build(options.sizes)
    pool = BlockPool(max(options.rows) * NUM_KEYS // BLOCK_SIZE, BLOCK_SIZE)
    cache = KVCache(model.layers, pool, dtype=model.dtype, device=model.device)
    for blocks in (*cache.k, *cache.v):
        blocks.normal_()
    model.bind(cache)
    print(f"{torch.cuda.get_device_name()}, {rate / 1e6:.0f} GB/s, {options.sizes}")
    weights = sum(parameter.nbytes for parameter in model._model.parameters())
    for num_seqs in options.rows:
        graph = capture(model, make_step(num_seqs))
        time = milliseconds(graph.replay)
        keys = num_seqs * NUM_KEYS * sum(layer.bytes_per_token(model.dtype)
                                         for layer in model.layers)  # fmt: skip
        floor = (weights + keys) / rate
        print(f"{num_seqs:4d} sequences: {time:.3f} ms, floor {floor:.3f} ({floor / time:.0%})")
        if options.kernels:
            list_kernels(graph)


if __name__ == "__main__":
    main()
