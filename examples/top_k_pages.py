"""Attend to the pages that matter most: Quest's selection by key minima and maxima.

::

    python examples/top_k_pages.py

A page's keys lie between their minimum and maximum in every column, so a query's score with any of
them is at most ``sum(max(q * low, q * high))`` (Tang et al., 2024). For each KV head the pages with
the largest bounds are listed in ``visible_blocks``; the last page, which has the newest tokens, is
always among them. What a bound misses is lost: the result is an approximation.
"""

import torch
from torch import Tensor

from pagetile import PagedBatch, paged_attention

NUM_SEQS, SEQ_LEN, BLOCK_SIZE, HEADS, KV_HEADS, HEAD_SIZE = 2, 2048, 16, 8, 2, 64


def page_bounds(k_cache: Tensor) -> tuple[Tensor, Tensor]:
    """Return the minimum and maximum of every page's keys, ``[num_blocks, num_kv_heads, size]``.

    An engine updates them when it writes a key; here all pages are full.
    """
    return k_cache.amin(dim=1), k_cache.amax(dim=1)


def select_pages(q: Tensor, low: Tensor, high: Tensor, batch: PagedBatch, count: int) -> Tensor:
    """Return ``visible_blocks`` with the ``count`` pages of the largest bounds, the last included.

    Args:
        q: ``[num_seqs, num_heads, head_size]``, one new token a sequence.
        low: Minimum of every page, as ``page_bounds`` returns it.
        high: Maximum of every page.
        batch: The batch; its sequences have as many pages as ``block_tables`` has columns.
        count: Pages of each KV head.
    """
    tables = batch.block_tables.long()
    group = q.shape[1] // low.shape[1]
    rows = q.view(len(q), low.shape[1], group, -1)[:, None]  # [seqs, 1, kv_heads, group, size]
    bounds = torch.maximum(rows * low[tables][:, :, :, None], rows * high[tables][:, :, :, None])
    bounds = bounds.sum(-1).amax(-1).transpose(1, 2)  # [seqs, kv_heads, pages]: of a group's best
    bounds[..., -1] = torch.inf
    return bounds.topk(count, dim=-1).indices.sort(dim=-1).values.int()


def main() -> None:
    """Compare a choice by bounds with a random one of as many pages."""
    torch.manual_seed(0)
    pages = SEQ_LEN // BLOCK_SIZE
    k_cache, v_cache = torch.randn(2, NUM_SEQS * pages, BLOCK_SIZE, KV_HEADS, HEAD_SIZE)
    topics = torch.randn(NUM_SEQS * pages, 1, KV_HEADS, HEAD_SIZE)
    k_cache = topics + 0.5 * k_cache  # neighbouring tokens are about the same things
    tables = torch.randperm(NUM_SEQS * pages).int().view(NUM_SEQS, pages)
    batch = PagedBatch.decode(tables, torch.full((NUM_SEQS,), SEQ_LEN, dtype=torch.int32), SEQ_LEN)
    wanted = topics[tables[:, pages // 3].long(), 0] + topics[tables[:, pages // 2].long(), 0]
    q = wanted.repeat_interleave(HEADS // KV_HEADS, dim=1)
    exact = paged_attention(q, k_cache, v_cache, batch).out

    def error(visible_blocks: Tensor) -> float:
        found = paged_attention(q, k_cache, v_cache, batch, visible_blocks=visible_blocks).out
        return float((found - exact).norm() / exact.norm())

    low, high = page_bounds(k_cache)
    print("pages   by bounds   random   (relative error of the output)")
    for count in (pages // 8, pages // 4, pages // 2, pages):
        chosen = select_pages(q, low, high, batch, count)
        random = torch.rand(NUM_SEQS, KV_HEADS, pages).topk(count).indices.sort().values.int()
        print(f"{count:5}   {error(chosen):9.3f}   {error(random):6.3f}")


if __name__ == "__main__":
    main()
