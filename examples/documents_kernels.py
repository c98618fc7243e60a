"""vLLM's paged attention as its documents describe it, in sixty lines of Triton for each version.

::

    python examples/documents_kernels.py                       # on a CUDA GPU
    TRITON_INTERPRET=1 python examples/documents_kernels.py    # anywhere, a line at a time

Read ``single_pass_kernel`` first (the documents' v1), then ``partition_kernel`` and
``reduce_kernel`` (v2). Both read the x-packed cache of the documents::

    k_cache[block, head]  [HEAD_SIZE / X, BLOCK_SIZE, X]   16 bytes of a key, then the next key's
    v_cache[block, head]  [HEAD_SIZE, BLOCK_SIZE]          one column of all keys of the block

They are written to be read: one program a query head, one block of keys at a time, no matrix units.
``pagetile.integrations.vllm_ops`` computes the same several times as fast: it reads a KV head once
for all its query heads, several blocks at a time, and overlaps copies with products.
"""

import os

import torch
import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def attend_block(
    q, m, l, acc, table, k_cache, v_cache, logical, kv_head, seq_len, scale, KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, X: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Take one block of keys into a head's running maximum ``m``, sum ``l`` and output ``acc``."""
    physical = tl.load(table + logical).to(tl.int64)  # int64: a cache has more than 2**31 elements
    start = (physical * KV_HEADS + kv_head) * HEAD_SIZE * BLOCK_SIZE
    chunk, token, element = tl.arange(0, CHUNKS), tl.arange(0, BLOCK_SIZE), tl.arange(0, X)
    is_used = logical * BLOCK_SIZE + token < seq_len

    # QK: the key's elements times the query's, summed over chunks and elements.
    k_at = (chunk * BLOCK_SIZE * X)[:, None, None] + (token * X)[None, :, None] + element
    k = tl.load(k_cache + start + k_at, mask=is_used[None, :, None], other=0.0).to(tl.float32)
    qk = tl.sum(tl.sum(q[:, None, :] * k, 2), 0) * scale
    qk = tl.where(is_used, qk, float("-inf"))

    # Softmax so far: when the maximum grows, what was summed before shrinks.
    new_m = tl.maximum(m, tl.max(qk, 0))
    shrink = tl.exp2((m - new_m) * LOG2_E)
    p = tl.exp2((qk - new_m) * LOG2_E)

    # LV: weights times values, summed over the block's tokens. Unused slots may hold NaN.
    column = tl.arange(0, HEAD_SIZE)
    v_at = (column * BLOCK_SIZE)[:, None] + token[None, :]
    v = tl.load(v_cache + start + v_at, mask=is_used[None, :], other=0.0).to(tl.float32)
    return new_m, l * shrink + tl.sum(p, 0), acc * shrink + tl.sum(p[None, :] * v, 1)


@triton.jit
def load_query(q, seq, head, NUM_HEADS: tl.constexpr, X: tl.constexpr, CHUNKS: tl.constexpr):
    """A head's query as ``[HEAD_SIZE / X, X]``, the order in which keys are read."""
    at = (tl.arange(0, CHUNKS) * X)[:, None] + tl.arange(0, X)[None, :]
    return tl.load(q + (seq * NUM_HEADS + head) * CHUNKS * X + at).to(tl.float32)


@triton.jit
def single_pass_kernel(
    out,  # [num_seqs, NUM_HEADS, HEAD_SIZE]
    q,  # [num_seqs, NUM_HEADS, HEAD_SIZE]
    k_cache,  # [num_blocks, KV_HEADS, HEAD_SIZE / X, BLOCK_SIZE, X]
    v_cache,  # [num_blocks, KV_HEADS, HEAD_SIZE, BLOCK_SIZE]
    block_tables,  # int32 [num_seqs, table_width]
    seq_lens,  # int32 [num_seqs]
    table_width, scale,
    NUM_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, X: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Version 1: one program walks all keys of a sequence. Grid ``(NUM_HEADS, num_seqs)``."""
    head, seq = tl.program_id(0), tl.program_id(1)
    seq_len = tl.load(seq_lens + seq)
    query = load_query(q, seq, head, NUM_HEADS, X, CHUNKS)
    m, l, acc = float("-inf"), 0.0, tl.zeros([HEAD_SIZE], tl.float32)
    for logical in range(tl.cdiv(seq_len, BLOCK_SIZE)):
        m, l, acc = attend_block(
            query, m, l, acc, block_tables + seq * table_width, k_cache, v_cache, logical,
            head // (NUM_HEADS // KV_HEADS), seq_len, scale,
            KV_HEADS, HEAD_SIZE, BLOCK_SIZE, X, CHUNKS,
        )  # fmt: skip
    result = tl.where(l > 0, acc / tl.where(l > 0, l, 1.0), 0.0)
    at = (seq * NUM_HEADS + head) * HEAD_SIZE + tl.arange(0, HEAD_SIZE)
    tl.store(out + at, result.to(out.dtype.element_ty))


@triton.jit
def partition_kernel(
    exp_sums,  # float32 [num_seqs, NUM_HEADS, max_partitions]
    max_logits,  # likewise
    tmp_out,  # [num_seqs, NUM_HEADS, max_partitions, HEAD_SIZE]
    q, k_cache, v_cache, block_tables, seq_lens,  # as above
    table_width, scale,
    NUM_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, X: tl.constexpr, CHUNKS: tl.constexpr, PARTITION: tl.constexpr,
):  # fmt: skip
    """Version 2: one program a partition. Grid ``(NUM_HEADS, num_seqs, max_partitions)``."""
    head, seq, partition = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    seq_len = tl.load(seq_lens + seq)
    if partition * PARTITION >= seq_len:
        return
    query = load_query(q, seq, head, NUM_HEADS, X, CHUNKS)
    first = partition * (PARTITION // BLOCK_SIZE)
    last = tl.minimum(first + PARTITION // BLOCK_SIZE, tl.cdiv(seq_len, BLOCK_SIZE))
    m, l, acc = float("-inf"), 0.0, tl.zeros([HEAD_SIZE], tl.float32)
    for logical in range(first, last):
        m, l, acc = attend_block(
            query, m, l, acc, block_tables + seq * table_width, k_cache, v_cache, logical,
            head // (NUM_HEADS // KV_HEADS), seq_len, scale,
            KV_HEADS, HEAD_SIZE, BLOCK_SIZE, X, CHUNKS,
        )  # fmt: skip
    at = (seq * NUM_HEADS + head) * tl.num_programs(2) + partition
    tl.store(max_logits + at, m)
    tl.store(exp_sums + at, l)
    tl.store(tmp_out + at * HEAD_SIZE + tl.arange(0, HEAD_SIZE), (acc / l).to(q.dtype.element_ty))


@triton.jit
def reduce_kernel(
    out, exp_sums, max_logits, tmp_out, seq_lens, max_partitions,
    NUM_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, PARTITION: tl.constexpr,
):  # fmt: skip
    """Version 2, second step: weigh the partitions by their sums. Grid ``(NUM_HEADS, num_seqs)``.

    ``out = Σ_j tmp_out[j] · exp_sums[j] · exp(max_logits[j] - M) / Σ_j exp_sums[j] · exp(...)``.
    """
    head, seq = tl.program_id(0), tl.program_id(1)
    row = (seq * NUM_HEADS + head) * max_partitions
    column = tl.arange(0, HEAD_SIZE)
    m, l, acc = float("-inf"), 0.0, tl.zeros([HEAD_SIZE], tl.float32)
    for j in range(tl.cdiv(tl.load(seq_lens + seq), PARTITION)):
        part_m = tl.load(max_logits + row + j)
        new_m = tl.maximum(m, part_m)
        shrink = tl.exp2((m - new_m) * LOG2_E)
        weight = tl.load(exp_sums + row + j) * tl.exp2((part_m - new_m) * LOG2_E)
        part = tl.load(tmp_out + (row + j) * HEAD_SIZE + column).to(tl.float32)
        m, l, acc = new_m, l * shrink + weight, acc * shrink + part * weight
    result = tl.where(l > 0, acc / tl.where(l > 0, l, 1.0), 0.0)
    tl.store(out + (seq * NUM_HEADS + head) * HEAD_SIZE + column, result.to(out.dtype.element_ty))


def attend(q, k_cache, v_cache, block_tables, seq_lens, scale, partition=None):
    """Attention of one new token a sequence: version 1, or version 2 by partitions of keys."""
    num_seqs, num_heads, head_size = q.shape
    _, kv_heads, chunks, block_size, x = k_cache.shape
    out, width = torch.empty_like(q), block_tables.shape[1]
    sizes = (num_heads, kv_heads, head_size, block_size, x, chunks)
    cache = (q, k_cache, v_cache, block_tables, seq_lens, width, scale)
    if partition is None:
        single_pass_kernel[num_heads, num_seqs](out, *cache, *sizes)
        return out
    most = max(1, -(-width * block_size // partition))
    exp_sums = torch.empty(num_seqs, num_heads, most, device=q.device)
    max_logits, tmp_out = torch.empty_like(exp_sums), q.new_empty(*exp_sums.shape, head_size)
    partition_kernel[num_heads, num_seqs, most](
        exp_sums, max_logits, tmp_out, *cache, *sizes, partition
    )
    reduce_kernel[num_heads, num_seqs](
        out, exp_sums, max_logits, tmp_out, seq_lens, most, num_heads, head_size, partition
    )
    return out


def main():
    """Compare both versions with ``pagetile.integrations.vllm_ops`` on random blocks."""
    from pagetile.integrations.vllm_ops import paged_attention_v1

    device = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("there is no GPU: set TRITON_INTERPRET=1")
    torch.manual_seed(0)
    q = torch.randn(3, 8, 64, device=device)
    k_cache, v_cache = torch.randn(12, 2, 16, 16, 4), torch.randn(12, 2, 64, 16)
    k_cache, v_cache = k_cache.to(device), v_cache.to(device)
    block_tables = torch.randperm(12, device=device).int().view(3, 4)
    seq_lens = torch.tensor([61, 1, 32], dtype=torch.int32, device=device)
    inputs = (q, k_cache, v_cache, block_tables, seq_lens)
    expected = torch.empty_like(q)
    paged_attention_v1(
        expected, *inputs[:3], 2, 64**-0.5, block_tables, seq_lens, 16, 64, None, "auto", 1.0, 1.0
    )
    for name, partition in (("single pass", None), ("partitions of 32", 32)):
        gap = (attend(*inputs, 64**-0.5, partition) - expected).abs().max()
        print(f"{name}: largest difference {gap:.1e}")


if __name__ == "__main__":
    main()
