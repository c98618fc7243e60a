"""Cases of paged attention, and their inputs, in which all unused memory is poisoned.

A cache that ``make_inputs`` builds, with blocks of 4 slots and sequences of 6 and 3 keys
(x = NaN, every other slot is random)::

    block        0        1        2        3        4
    slots     a4 a5 x x  x x x x  a0 a1 a2 a3  b0 b1 b2 x  x x x x

    block_tables = [[2, 0, 2147480000], [3, 2147480000, 2147480000], …]
"""

from __future__ import annotations

import dataclasses
import math
import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..ops.paged_attention import PagedBatch, Problem, SharedPrefixes, paged_attention
from ..ops.paged_attention.problem import alignment, has_aligned_rows
from ..ops.scales import LARGEST_CODE, bind_scales
from ..shapes import Form, form
from ..tiles.state import AttentionOutput

TABLE_POISON = 2147480000
"""Block id past the end of a table's row; it is out of bounds of any cache."""

_SHORT_NAMES = {
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
    torch.int8: "int8",
}
_INT8_POISON = -128
"""int8 has no NaN; at least ``write_kv`` writes no -128."""


@dataclass(frozen=True)
class PagedCase:
    """A call of ``paged_attention`` without its tensors: lengths, sizes, types and features.

    The batch of ``make_inputs`` has one more sequence, without keys, at a random place.

    Examples:
        >>> case = PagedCase(query_lens=(1, 5), seq_lens=(30, 5), num_heads=8, sliding_window=4)
        >>> str(case)
        's2-h8/2-d64-b16-w4-f32'
    """

    query_lens: tuple[int, ...] = (1,)
    """New tokens of each sequence; 0, or more than its keys: the first rows then see none."""
    seq_lens: tuple[int, ...] = (17,)
    """Keys of each sequence, new tokens included; may be 0."""
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 64
    v_head_size: int | None = None
    """``None``: as ``head_size``."""
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    """Element type of q and out."""
    kv_dtype: torch.dtype | None = None
    """Element type of the caches. ``None``: as ``dtype``."""
    scales: str | None = None
    """Kind of scales of an 8-bit cache: one per ``"tensor"``, ``"head"`` or ``"token"``."""
    softmax_scale: float | None = None
    causal: bool = True
    sliding_window: int | None = None
    logits_soft_cap: float | None = None
    has_alibi: bool = False
    has_sinks: bool = False
    strided: bool = False
    """Whether q, out, caches and tables are views of larger tensors, dimensions in any order."""
    shares_prefix: bool = False
    """Whether sequences share the first one's first full blocks."""
    visible_share: float | None = None
    """Part of the blocks that ``visible_blocks`` lists for a KV head, on average; ``None``: all."""
    seed: int = 0
    """Seed of the values, the order of blocks and the strides."""

    def __post_init__(self) -> None:
        if len(self.query_lens) != len(self.seq_lens):
            raise ValueError(
                f"query_lens has {len(self.query_lens)} entries but seq_lens has "
                f"{len(self.seq_lens)}: one each a sequence"
            )
        if (self.cache_dtype in LARGEST_CODE) != (self.scales is not None):
            raise ValueError(
                f"scales is {self.scales!r} but caches are {self.cache_dtype}: an 8-bit cache has "
                "scales, no other has"
            )

    def __str__(self) -> str:
        """A short name, good as a test's id."""
        types = [_SHORT_NAMES.get(dtype, str(dtype)) for dtype in (self.dtype, self.cache_dtype)]
        words = [
            f"s{len(self.seq_lens)}",
            f"h{self.num_heads}/{self.num_kv_heads}",
            f"d{self.head_size}" + f"/{self.v_head_size}" * (self.v_head_size is not None),
            f"b{self.block_size}",
            f"scale{self.softmax_scale}" * (self.softmax_scale is not None),
            "full" * (not self.causal),
            f"w{self.sliding_window}" * (self.sliding_window is not None),
            f"cap{self.logits_soft_cap}" * (self.logits_soft_cap is not None),
            "alibi" * self.has_alibi,
            "sinks" * self.has_sinks,
            "strided" * self.strided,
            "shared" * self.shares_prefix,
            f"v{self.visible_share}" * (self.visible_share is not None),
            "/".join(dict.fromkeys(types)),
            f"{self.scales}-scales" * (self.scales is not None),
        ]
        return "-".join(word for word in words if word)

    @property
    def cache_dtype(self) -> torch.dtype:
        """Element type of the caches."""
        return self.kv_dtype or self.dtype

    @property
    def value_size(self) -> int:
        """Width of a head's values."""
        return self.head_size if self.v_head_size is None else self.v_head_size


@dataclass(frozen=True, eq=False)
class PagedInputs:
    """The arguments of ``paged_attention`` for a case, and a tensor for its result."""

    case: PagedCase
    q: Tensor
    """``[num_tokens, num_heads, head_size]``."""
    k_cache: Tensor
    """``[num_blocks, block_size, num_kv_heads, head_size]``, NaN where no sequence has a key (or
    -128 in int8)."""
    v_cache: Tensor
    """``[num_blocks, block_size, num_kv_heads, v_head_size]``, likewise at the same slots."""
    batch: PagedBatch
    options: dict[str, Any]
    """Keyword arguments: scale, mask, cap, ``alibi_slopes``, ``sinks``, and the scales of 8-bit
    caches, NaN for slots where no sequence has a key."""
    out: Tensor
    """``[num_tokens, num_heads, v_head_size]`` of NaN, to be written."""

    @property
    def problem(self) -> Problem:
        """Return the problem, for ``make_plan``."""
        k_scale, v_scale = self.options.get("k_scale"), self.options.get("v_scale")
        k_form, v_form = Form(*form(self.k_cache)), Form(*form(self.v_cache))
        has_aligned_caches = alignment(self.q, self.k_cache, self.v_cache, None)[0]
        return Problem(
            num_seqs=self.batch.num_seqs,
            num_tokens=self.q.shape[0],
            max_query_len=self.batch.max_query_len,
            max_seq_len=self.batch.max_seq_len,
            num_heads=self.q.shape[1],
            num_kv_heads=self.k_cache.shape[2],
            head_size=self.q.shape[2],
            v_head_size=self.v_cache.shape[3],
            block_size=self.k_cache.shape[1],
            q_dtype=self.q.dtype,
            kv_dtype=self.k_cache.dtype,
            scale_kind=bind_scales(k_scale, v_scale, self.k_cache, self.v_cache)[0],
            is_aligned=has_aligned_rows(k_form, v_form, has_aligned_caches),
            logits_soft_cap=self.options.get("logits_soft_cap"),
            max_visible=self.max_visible,
            sliding_window=self.options.get("sliding_window"),
        )

    @property
    def max_visible(self) -> int | None:
        """Length of the lists of visible blocks, if there are any."""
        visible_blocks = self.options.get("visible_blocks")
        return None if visible_blocks is None else int(visible_blocks.shape[2])

    def attend(self, **changes: Any) -> AttentionOutput:
        """Call ``paged_attention`` on these inputs; ``changes`` are its keyword arguments."""
        options = {**self.options, **changes}
        return paged_attention(self.q, self.k_cache, self.v_cache, self.batch, **options)

    def replace(self, **changes: Any) -> PagedInputs:
        """Return these inputs with some fields changed."""
        return dataclasses.replace(self, **changes)

    def share(self) -> PagedInputs:
        """Return these inputs with ``shared_prefixes``: neighbours with common blocks are a group.

        A group's prefix is as long as all its sequences allow.
        """
        tables, block_size = self.batch.block_tables.tolist(), self.k_cache.shape[1]
        query_lens = self.batch.cu_seqlens_q.diff().tolist()
        seq_lens = self.batch.seq_lens.tolist()
        old = [max(0, n - new) // block_size for n, new in zip(seq_lens, query_lens, strict=True)]
        starts, prefixes = [0], [old[0]]
        for seq in range(1, len(tables)):
            most = min(prefixes[-1], old[seq])
            pairs = zip(tables[starts[-1]][:most], tables[seq][:most], strict=True)
            common = next((at for at, (a, b) in enumerate(pairs) if a != b), most)
            if common:
                prefixes[-1] = common
            else:
                starts.append(seq)
                prefixes.append(old[seq])
        groups, lens = (
            torch.tensor(numbers, dtype=torch.int32, device=self.batch.seq_lens.device)
            for numbers in ([*starts, len(tables)], [n * block_size for n in prefixes])
        )
        shared = SharedPrefixes(groups, lens)
        return self.replace(batch=dataclasses.replace(self.batch, shared_prefixes=shared))

    def to(self, device: torch.device | str) -> PagedInputs:
        """Return a copy of these inputs on a device, with the same strides and poison between."""
        batch = dataclasses.replace(
            self.batch,
            block_tables=_move(self.batch.block_tables, device),
            seq_lens=_move(self.batch.seq_lens, device),
            cu_seqlens_q=_move(self.batch.cu_seqlens_q, device),
        )
        options = {
            name: _move(value, device) if isinstance(value, Tensor) else value
            for name, value in self.options.items()
        }
        q, k_cache, v_cache, out = (
            _move(tensor, device) for tensor in (self.q, self.k_cache, self.v_cache, self.out)
        )
        return self.replace(
            q=q, k_cache=k_cache, v_cache=v_cache, out=out, batch=batch, options=options
        )


def _move(tensor: Tensor, device: torch.device | str) -> Tensor:
    memory = tensor.new_empty(0).set_(tensor.untyped_storage())
    return memory.to(device, copy=True).as_strided(
        tensor.shape, tensor.stride(), tensor.storage_offset()
    )


def make_inputs(case: PagedCase) -> PagedInputs:
    """Draw a case's inputs; the same case gives the same inputs on every machine.

    Physical blocks are in random order. Unused slots of used blocks, unused blocks, ``out`` and
    (with ``strided``) all memory around the tensors hold NaN (-128 in int8); table entries past
    a row's end hold ``TABLE_POISON``.

    Examples:
        >>> inputs = make_inputs(PagedCase(query_lens=(2, 1), seq_lens=(2, 30), block_size=8))
        >>> inputs.batch.num_seqs, inputs.q.shape, inputs.attend(impl="reference").out.isnan().any()
        (3, torch.Size([4, 4, 64]), tensor(False))
    """
    rng, generator = random.Random(case.seed), torch.Generator().manual_seed(case.seed)
    query_lens, seq_lens = list(case.query_lens), list(case.seq_lens)
    empty = rng.randint(0, len(seq_lens))
    query_lens.insert(empty, rng.randint(0, 1))
    seq_lens.insert(empty, 0)
    block_tables, used = _place(case, seq_lens, rng)

    def tensor(numbers: Tensor, dtype: torch.dtype, used: Tensor | None = None) -> Tensor:
        poison = _INT8_POISON if dtype == torch.int8 else math.nan
        if used is not None:
            numbers[~used] = poison
        return _spread(numbers.to(dtype), poison, rng if case.strided else None)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    num_tokens, kv = sum(query_lens), (*used.shape, case.num_kv_heads)
    q = tensor(normal(num_tokens, case.num_heads, case.head_size), case.dtype)
    k_cache, v_cache = (
        tensor(_encodable(normal(*kv, size), case.cache_dtype), case.cache_dtype, used)
        for size in (case.head_size, case.value_size)
    )
    out = tensor(normal(num_tokens, case.num_heads, case.value_size) * math.nan, case.dtype)
    starts = torch.tensor([0, *query_lens]).cumsum(0, dtype=torch.int32)
    batch = PagedBatch(
        _spread(block_tables, TABLE_POISON, rng if case.strided else None),
        torch.tensor(seq_lens, dtype=torch.int32),
        starts,
        max_query_len=max(query_lens) + rng.choice([0, 0, 7]),
        max_seq_len=max(seq_lens) + rng.choice([0, 0, 1000]),
    )
    options = {
        "softmax_scale": case.softmax_scale,
        "causal": case.causal,
        "sliding_window": case.sliding_window,
        "logits_soft_cap": case.logits_soft_cap,
        "alibi_slopes": torch.rand(case.num_heads, generator=generator) if case.has_alibi else None,
        "sinks": 2 * torch.randn(case.num_heads, generator=generator) if case.has_sinks else None,
    }
    if case.visible_share is not None:
        visible_blocks = _list_blocks(case, seq_lens, rng)
        options["visible_blocks"] = _spread(visible_blocks, -1, rng if case.strided else None)
    shapes = {"tensor": (), "head": kv[2:], "token": kv}
    for name in ("k_scale", "v_scale") if case.scales else ():
        # Stored values cover a quarter of their range; times the scales, about ±1.
        numbers = torch.rand(shapes[str(case.scales)], generator=generator) + 0.5
        numbers *= 4 / LARGEST_CODE[case.cache_dtype]
        if case.scales == "token" and case.seed % 2 == 0:  # as in a ``KVCache``
            numbers = numbers.transpose(1, 2).contiguous().transpose(1, 2)
        options[name] = tensor(numbers, torch.float32, used if case.scales == "token" else None)
    return PagedInputs(case, q, k_cache, v_cache, batch, options, out)


def _encodable(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Normal numbers as they are, or over the range of an 8-bit type."""
    if dtype not in LARGEST_CODE:
        return numbers
    largest = LARGEST_CODE[dtype]
    codes = (numbers * (largest / 4)).clamp(-largest, largest)
    return codes.round() if dtype == torch.int8 else codes


def _place(case: PagedCase, seq_lens: list[int], rng: random.Random) -> tuple[Tensor, Tensor]:
    """Give every sequence its blocks: the tables, and which slots are used."""
    lengths = [-(-seq_len // case.block_size) for seq_len in seq_lens]
    num_blocks = sum(lengths) + rng.randint(1, 4)
    free = rng.sample(range(num_blocks), num_blocks)
    block_tables = torch.full(
        (len(seq_lens), max(lengths) + rng.randint(0, 2)), TABLE_POISON, dtype=torch.int32
    )
    used = torch.zeros(num_blocks, case.block_size, dtype=torch.bool)
    prefix: list[int] = []
    for seq, (length, seq_len) in enumerate(zip(lengths, seq_lens, strict=True)):
        blocks = prefix[: seq_len // case.block_size]
        blocks = blocks + [free.pop() for _ in range(length - len(blocks))]
        if case.shares_prefix and not prefix:
            prefix = blocks[: seq_len // case.block_size]
        block_tables[seq, :length] = torch.tensor(blocks, dtype=torch.int32)
        for i, block in enumerate(blocks):
            used[block, : seq_len - i * case.block_size] = True
    return block_tables, used


def _list_blocks(case: PagedCase, seq_lens: list[int], rng: random.Random) -> Tensor:
    """Draw the visible blocks of every KV head of every sequence; -1 after the last."""
    lists = [
        [
            [
                block
                for block in range(-(-seq_len // case.block_size))
                if rng.random() < (case.visible_share or 0.0)
            ]
            for _ in range(case.num_kv_heads)
        ]
        for seq_len in seq_lens
    ]
    longest = max(len(blocks) for heads in lists for blocks in heads)
    listed = torch.full(
        (len(seq_lens), case.num_kv_heads, longest + rng.randint(0, 2)), -1, dtype=torch.int32
    )
    for seq, heads in enumerate(lists):
        for head, blocks in enumerate(heads):
            listed[seq, head, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
    return listed


def _spread(tensor: Tensor, poison: float, rng: random.Random | None) -> Tensor:
    """The same tensor as a view of a larger, poisoned one, its leading dimensions in any order."""
    if rng is None or tensor.dim() == 0:
        return tensor
    last = tensor.dim() - 1
    order = [*rng.sample(range(last), last), last]
    before = [rng.randint(0, 2) for _ in order]
    after = [rng.randint(0, 2) for _ in order[:-1]] + [rng.choice([0, 1, 3, 8])]
    sizes = [tensor.shape[dim] for dim in order]
    padded = [a + size + b for a, size, b in zip(before, sizes, after, strict=True)]
    view = torch.full(padded, poison, dtype=tensor.dtype)
    for dim, size in enumerate(sizes):
        view = view.narrow(dim, before[dim], size)
    view = view.permute([order.index(dim) for dim in range(tensor.dim())])
    return view.copy_(tensor)
