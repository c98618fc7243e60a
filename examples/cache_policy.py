"""A custom cache policy: keep the first blocks and the last few, drop the middle.

::

    python examples/cache_policy.py

StreamingLLM (Xiao et al., 2023) keeps the first tokens ("attention sinks") and a window of recent
ones, so that memory stays constant however long a text becomes. With pages that is a list of
blocks: the policy releases a block in the middle, and the next call's block table leaves it out.
"""

import torch

from pagetile import BlockPool, PagedBatch, paged_attention, write_kv

HEADS, KV_HEADS, HEAD_SIZE = 8, 2, 64


class SinkAndWindow:
    """The blocks of one sequence: ``num_sinks`` first ones and at most ``num_recent`` last ones.

    Keys that rotate with their position are written with their position in the cache, as the
    paper does; here they do not rotate.
    """

    def __init__(self, pool: BlockPool, num_sinks: int = 1, num_recent: int = 4) -> None:
        self.pool, self.num_sinks, self.num_recent = pool, num_sinks, num_recent
        self.blocks: list[int] = []
        self.num_tokens = 0  # in the cache, not in the text

    def append(self) -> int:
        """Return the slot of the next token, after dropping a block where one must go."""
        if self.num_tokens == len(self.blocks) * self.pool.block_size:
            if len(self.blocks) == self.num_sinks + self.num_recent:
                self.pool.release([self.blocks.pop(self.num_sinks)])
                self.num_tokens -= self.pool.block_size
            self.blocks += self.pool.allocate()
        block, offset = self.blocks[-1], self.num_tokens % self.pool.block_size
        self.num_tokens += 1
        return block * self.pool.block_size + offset


def main(num_tokens: int = 500) -> None:
    """Feed a long text token by token and compare the last result with dense attention."""
    torch.manual_seed(0)
    pool = BlockPool(num_blocks=8, block_size=16)
    k_cache, v_cache = torch.zeros(2, pool.num_blocks, pool.block_size, KV_HEADS, HEAD_SIZE)
    cached = SinkAndWindow(pool)
    k, v = torch.randn(2, num_tokens, KV_HEADS, HEAD_SIZE)
    q = torch.randn(num_tokens, HEADS, HEAD_SIZE)
    for t in range(num_tokens):
        write_kv(k[t : t + 1], v[t : t + 1], k_cache, v_cache, torch.tensor([cached.append()]))
        batch = PagedBatch.of([cached.blocks], [cached.num_tokens])
        out = paged_attention(q[t : t + 1], k_cache, v_cache, batch).out

    kept = num_tokens - (cached.num_tokens - pool.block_size)
    visible = [*range(pool.block_size), *range(kept, num_tokens)]
    expected = torch.nn.functional.scaled_dot_product_attention(
        q[-1:].transpose(0, 1), k[visible].transpose(0, 1), v[visible].transpose(0, 1),
        enable_gqa=True,
    ).transpose(0, 1)  # fmt: skip
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-4)
    pool.check([cached.blocks])
    print(f"{num_tokens} tokens read, {cached.num_tokens} in {len(cached.blocks)} blocks; "
          f"{pool.num_free} of {pool.num_blocks} blocks are free")  # fmt: skip


if __name__ == "__main__":
    main()
