"""Host time of decode steps without a device: the engine over a stub in place of recorded steps.

``python -m benchmarks.host_steps`` needs no GPU and prints JSON: the CPU time of one step of 1, 64
and 256 sequences, in milliseconds, as the engine's thread counts it. All host code is real except
copies and events; the stub, in place of a replayed graph, leaves the same tokens every time. On a
GPU, ``python -m benchmarks.workload_n host`` measures the host time that remains there.
"""

from __future__ import annotations

import gc
import json
import random
import time
from bisect import bisect_left
from typing import Any

import torch

from pagetile import BlockPool, KVCache, SamplingParams
from pagetile.engine import Engine
from pagetile.engine.cuda_graphs import padded_sizes
from pagetile.models import load_model

BLOCK_SIZE = 16
NUM_STEPS, NUM_REPEATS = 160, 8


class StubGraphs:
    """Replaces ``StepGraphs``: every step samples token 1."""

    def __init__(self, num_rows: int) -> None:
        from pagetile.engine.triton_draw import count_words, unpack

        self.sizes = padded_sizes(num_rows)
        self._packed = {
            size: torch.zeros(count_words(size), dtype=torch.int32) for size in self.sizes
        }
        for size, packed in self._packed.items():
            unpack(packed, size)[0].fill_(1)

    def fit(self, size: int) -> int:
        """The size of the recorded step that runs ``size`` rows."""
        return self.sizes[bisect_left(self.sizes, size)]

    def has(self, size: int, *form: bool) -> bool:
        """Whether the step is recorded."""
        return size in self._packed

    ensure = has

    def replay(self, size: int, *form: bool) -> torch.Tensor:
        """The sampled tokens of a step."""
        return self._packed[size]


def make_engine(num_rows: int = 256, num_blocks: int = 25_000) -> Engine:
    """An engine on the CPU that launches decode steps as on a GPU, over a stub."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=96, hidden_size=48, head_dim=16, intermediate_size=80, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096,
    )  # fmt: skip
    model = load_model(LlamaForCausalLM(config))
    engine = Engine(
        model,
        KVCache(model.layers, BlockPool(num_blocks, BLOCK_SIZE)),
        max_num_seqs=num_rows,
        max_num_batched_tokens=8192,
        max_model_len=4096,
        async_scheduling=True,
    )
    kernels: Any = engine._runner.use_kernels()
    kernels.graphs = StubGraphs(num_rows)
    return engine


def time_step(engine: Engine, num_seqs: int, num_steps: int, num_repeats: int) -> float:
    """Milliseconds of CPU time of a decode step: the least of the repeats' averages."""
    rng = random.Random(5)
    params = SamplingParams(max_tokens=4000, temperature=0.6, ignore_eos=True)
    ids = [
        # Lengths differ, so that in every step about as many sequences begin a new block.
        engine.add_request([rng.randrange(90) for _ in range(16 + at % BLOCK_SIZE)], params)
        for at in range(num_seqs)
    ]
    for _ in range(20):
        engine.step()
    found = []
    for _ in range(num_repeats):
        start = time.thread_time()
        for _ in range(num_steps):
            engine.step()
        found.append(1e3 * (time.thread_time() - start) / num_steps)
    for request_id in ids:
        engine.abort(request_id)
        engine.take_output(request_id)
    return min(found)


def main() -> None:
    """Print the times."""
    engine = make_engine()
    gc.collect()
    gc.freeze()
    values = {str(n): time_step(engine, n, NUM_STEPS, NUM_REPEATS) for n in (1, 64, 256)}
    print(json.dumps({"what": "host ms a step", "about": "a stub for a device", **values}))


if __name__ == "__main__":
    main()
