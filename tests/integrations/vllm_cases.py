"""Poisoned decode problems in vLLM's x-packed layout, and what they should give."""

import random
from dataclasses import dataclass

import torch

from pagetile.integrations.vllm_ops import pack_cache
from pagetile.testing import PagedCase, compare, make_inputs, oracle, tolerance
from pagetile.tiles.state import AttentionOutput

PARTITION = 512
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
NAMES = {E4M3: "fp8_e4m3", E5M2: "fp8_e5m2"}


def decode_case(seq_lens=(1, 700, 37, 1030), **changes):
    case = {"num_heads": 8, "num_kv_heads": 2, "head_size": 64, "dtype": F32, **changes}
    return PagedCase(query_lens=(1,) * len(seq_lens), seq_lens=tuple(seq_lens), **case)


def random_decode_case(rng, dtypes=(F32, F16, BF16), longest=1500):
    dtype = rng.choice(dtypes)
    is_8_bit = rng.random() < 0.3
    num_kv_heads = rng.choice([1, 2, 3])
    lengths = [rng.randint(*rng.choice([(1, 40), (1, 300), (1, longest)])) for _ in range(4)]
    return decode_case(
        lengths[: rng.randint(1, 4)],
        num_kv_heads=num_kv_heads,
        num_heads=num_kv_heads * rng.choice([1, 2, 3, 4, 5, 7, 8, 40]),
        head_size=16 * rng.randint(1, 8) if is_8_bit else 8 * rng.randint(1, 16),
        block_size=rng.choice([8, 8, 16, 16, 16, 32, 32, 64, 128, 256]),
        dtype=dtype,
        kv_dtype=rng.choice([E4M3, E5M2]) if is_8_bit else None,
        scales="tensor" if is_8_bit else None,
        has_alibi=rng.random() < 0.3,
        softmax_scale=rng.choice([None, 0.0, 0.5, -0.1]),
        shares_prefix=rng.random() < 0.2,
        seed=rng.randrange(1 << 31),
    )


@dataclass
class Call:
    """The arguments of ``paged_attention_v1`` and ``_v2`` that a case becomes."""

    inputs: object
    out: torch.Tensor
    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    tables: torch.Tensor
    seq_lens: torch.Tensor
    slopes: torch.Tensor
    k_scale: torch.Tensor
    v_scale: torch.Tensor
    partitions: tuple

    @property
    def has_row(self):
        """Which sequences have a row in the package's own, ragged queries."""
        return self.inputs.batch.cu_seqlens_q.diff() > 0

    def run(self, ops, version, mirror, impl, **sparse):
        """Call the operator where ``impl`` runs; ``out`` and the partitions are written."""
        case, options = self.inputs.case, self.inputs.options
        scale = options["softmax_scale"]
        tensors = (
            self.out, *self.partitions, self.query, self.key_cache, self.value_cache, self.tables,
            self.seq_lens, self.slopes, self.k_scale, self.v_scale,
        )  # fmt: skip
        with mirror(*tensors, impl=impl) as there:
            out, *partitions, query, k, v, tables, lengths, slopes, k_scale, v_scale = there
            rest = (
                query, k, v, case.num_kv_heads,
                case.head_size**-0.5 if scale is None else scale,
                tables, lengths, case.block_size, self.inputs.batch.max_seq_len,
                slopes if case.has_alibi else None, NAMES.get(case.kv_dtype, "auto"),
                k_scale, v_scale,
            )  # fmt: skip
            if version == 1:
                ops.paged_attention_v1(out, *rest, **sparse)
            else:
                ops.paged_attention_v2(out, *partitions, *rest, **sparse)


def make_call(case):
    """Caches with NaN where no sequence has a key, tables with garbage, results of NaN."""
    inputs = make_inputs(case)
    key_cache, value_cache = pack_cache(inputs.k_cache, inputs.v_cache)
    if case.kv_dtype in NAMES:
        key_cache, value_cache = key_cache.view(torch.uint8), value_cache.view(torch.uint8)
    num_seqs, batch = inputs.batch.num_seqs, inputs.batch
    query = torch.full((num_seqs, case.num_heads, case.head_size), torch.nan, dtype=case.dtype)
    query[batch.cu_seqlens_q.diff() > 0] = inputs.q
    sums = (num_seqs, case.num_heads, -(-batch.max_seq_len // PARTITION) + 1)
    partitions = (
        torch.full(sums, torch.nan),
        torch.full(sums, torch.nan),
        torch.full((*sums, case.head_size), torch.nan, dtype=case.dtype),
    )
    one = torch.ones(())
    return Call(
        inputs, torch.full_like(query, torch.nan), query, key_cache, value_cache,
        batch.block_tables, batch.seq_lens,
        inputs.options["alibi_slopes"] if case.has_alibi else torch.zeros(case.num_heads),
        inputs.options.get("k_scale", one), inputs.options.get("v_scale", one), partitions,
    )  # fmt: skip


def assert_right(call):
    """``out`` is the oracle's, and 0 for sequences without keys."""
    expected = oracle(call.inputs)
    result = AttentionOutput(call.out[call.has_row], expected.lse.float())
    comparison = compare(result, call.inputs, expected, tolerance(call.inputs, expected))
    assert comparison.ratio <= 1, f"{call.inputs.case}\n{comparison}"
    assert not call.out[call.seq_lens == 0].any()


def dense_scores(call, seq):
    """Float64 logits ``[num_heads, n]`` and values ``[num_heads, n, head_size]`` of a sequence."""
    inputs, case = call.inputs, call.inputs.case
    n = int(call.seq_lens[seq])
    blocks = call.tables[seq, : -(-n // case.block_size)].long()
    group = case.num_heads // case.num_kv_heads
    k, v = (
        cache[blocks].flatten(0, 1)[:n].double().repeat_interleave(group, 1).transpose(0, 1)
        for cache in (inputs.k_cache, inputs.v_cache)
    )
    scale = inputs.options["softmax_scale"]
    scale = case.head_size**-0.5 if scale is None else scale
    s = (k @ call.query[seq].double()[..., None])[..., 0] * (scale * call.k_scale.double())
    if case.has_alibi:
        s += call.slopes.double()[:, None] * (torch.arange(n) - n + 1)
    return s, v * call.v_scale.double()


def random_cases(count, first=0, **changes):
    return [
        random_decode_case(random.Random(seed), **changes) for seed in range(first, first + count)
    ]
