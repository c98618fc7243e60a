"""Many sequences over one long prompt: read the prompt once, merge by log-sum-exp.

::

    python examples/shared_prefixes.py

Attention over a prefix and attention over the rest are two calls. Each returns the log-sum-exp of
its scores, and ``merge_states`` combines them exactly. The first call treats the new tokens of all
sequences as the rows of one sequence, so the prefix is read once and not once a sequence. That is
faster on a GPU, which is bound by reading the cache, but not on a CPU, which is bound by computing.
"""

import time
from collections.abc import Callable

import torch

from pagetile import PagedBatch, merge_states, paged_attention

NUM_SEQS, PREFIX_LEN, OWN_LEN, BLOCK_SIZE = 32, 8192, 32, 16
HEADS, KV_HEADS, HEAD_SIZE = 8, 2, 64


def best_of(call: Callable[[], object], repeats: int = 5) -> float:
    """Return the least time of some calls, in milliseconds."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return 1e3 * min(times)


def main() -> None:
    """Decode one token for each sequence, both ways."""
    torch.manual_seed(0)
    prefix_blocks, own_blocks = PREFIX_LEN // BLOCK_SIZE, OWN_LEN // BLOCK_SIZE
    num_blocks = prefix_blocks + NUM_SEQS * own_blocks
    k_cache, v_cache = torch.randn(2, num_blocks, BLOCK_SIZE, KV_HEADS, HEAD_SIZE)
    q = torch.randn(NUM_SEQS, HEADS, HEAD_SIZE)
    prefix = list(range(prefix_blocks))
    own = [
        list(range(start, start + own_blocks))
        for start in range(prefix_blocks, num_blocks, own_blocks)
    ]

    whole = PagedBatch.of([prefix + blocks for blocks in own], [PREFIX_LEN + OWN_LEN] * NUM_SEQS)
    once = PagedBatch.of([prefix], [PREFIX_LEN], query_lens=[NUM_SEQS])
    rest = PagedBatch.of(own, [OWN_LEN] * NUM_SEQS)

    def plain() -> torch.Tensor:
        return paged_attention(q, k_cache, v_cache, whole).out

    def shared() -> torch.Tensor:
        first = paged_attention(q, k_cache, v_cache, once, causal=False)
        second = paged_attention(q, k_cache, v_cache, rest)
        return merge_states(
            torch.stack([first.out, second.out]), torch.stack([first.lse, second.lse])
        ).out

    torch.testing.assert_close(shared(), plain(), atol=1e-5, rtol=1e-4)
    slot_bytes = 2 * KV_HEADS * HEAD_SIZE * k_cache.element_size()
    separate = NUM_SEQS * (PREFIX_LEN + OWN_LEN) * slot_bytes
    merged = (PREFIX_LEN + NUM_SEQS * OWN_LEN) * slot_bytes
    print(f"{NUM_SEQS} sequences over {PREFIX_LEN} shared tokens, {OWN_LEN} of their own")
    print(f"one call: {separate / 2**20:.0f} MiB of keys and values, {best_of(plain):.1f} ms")
    print(f"two calls, merged: {merged / 2**20:.0f} MiB, {best_of(shared):.1f} ms")


if __name__ == "__main__":
    main()
