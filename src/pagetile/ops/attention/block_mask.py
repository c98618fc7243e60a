"""Block-sparse masks of attention: which blocks of queries see which blocks of keys."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import DTypeError, ShapeError, plural
from ...shapes import check_tensors


def _is_integer(value: object, *, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


@dataclass(frozen=True, eq=False)
class BlockMask:
    """Which blocks of queries see which blocks of keys; hidden tiles are not computed.

    Query ``i`` of a sequence sees key ``j`` only if ``mask[..., i // block_q, j // block_k]`` is
    True, and if causality and the sliding window let it. Both count from the sequence's first row.

    GPU kernels are fastest if the blocks are multiples of their tiles, as 128 × 128 always is. They
    use lists of tiles, which are made on a mask's first use and kept as long as the tensor lives,
    so use one mask for all layers and steps that share it.

    Args:
        mask: bool ``[batch or 1, num_heads or 1, q_blocks, k_blocks]``, where ``q_blocks`` is
            ``ceil(query_len / block_q)`` and ``k_blocks`` is ``ceil(seq_len / block_k)``.
        block_q: Queries of a block.
        block_k: Keys of a block.

    Raises:
        ShapeError: ``mask`` has not 4 dimensions, or a block size is not a positive integer.
        DTypeError: ``mask`` is not a bool tensor.

    Examples:
        >>> import torch
        >>> from pagetile import BlockMask, attention
        >>> q, k, v = torch.randn(3, 1, 512, 8, 64).unbind()
        >>> diagonal = BlockMask(torch.eye(4, dtype=torch.bool)[None, None])
        >>> attention(q, k, v, block_mask=diagonal).out.shape
        torch.Size([1, 512, 8, 64])
    """

    mask: Tensor
    block_q: int = 128
    block_k: int = 128

    def __post_init__(self) -> None:
        if not isinstance(self.mask, Tensor) or self.mask.dtype != torch.bool:
            given = self.mask.dtype if isinstance(self.mask, Tensor) else type(self.mask).__name__
            raise DTypeError(f"BlockMask's mask is {given}, expected a tensor of torch.bool")
        check_tensors(mask=self.mask)
        if self.mask.dim() != 4:
            raise ShapeError(
                f"BlockMask's mask has {plural(self.mask.dim(), 'dimension')} "
                f"{list(self.mask.shape)}, expected [batch or 1, num_heads or 1, "
                "q_blocks, k_blocks]"
            )
        for name in ("block_q", "block_k"):
            if not _is_integer(getattr(self, name), least=1):
                raise ShapeError(
                    f"BlockMask's {name} is {getattr(self, name)!r}, expected an integer of at "
                    "least 1"
                )

    def expand(self, query_len: int, seq_len: int) -> Tensor:
        """Return the mask as bool ``[batch or 1, num_heads or 1, query_len, seq_len]``."""
        rows = self.mask.repeat_interleave(self.block_q, dim=-2)[..., :query_len, :]
        return rows.repeat_interleave(self.block_k, dim=-1)[..., :seq_len]

    @staticmethod
    def local_strided(
        query_len: int,
        seq_len: int,
        *,
        local_blocks: int,
        vert_stride: int,
        block_size: int = 64,
        head_sliding_step: int = 0,
        num_heads: int = 1,
        num_kv_heads: int | None = None,
        tp_rank: int = 0,
        device: torch.device | str = "cpu",
    ) -> BlockMask:
        """The local-plus-strided pattern of vLLM's block-sparse paged attention.

        With ``B`` the block of a query's position and ``b`` that of a key, a query sees the
        ``local_blocks`` blocks that end with its own (``b > B - local_blocks``) and every
        ``vert_stride``-th (``(b + offset) % vert_stride == 0``). The offset is
        ``(tp_rank * num_heads + head) * head_sliding_step + 1``, or with a negative step
        ``(tp_rank * num_kv_heads + kv_head) * -head_sliding_step + 1``. vLLM's kernel attends
        causally: pass ``causal=True`` to ``attention`` as well.

        Args:
            query_len: Queries, of which the last stands at the last key.
            seq_len: Keys.
            local_blocks: Blocks up to the query's own that it sees, its own included.
            vert_stride: Distance in blocks of the columns that every query sees.
            block_size: Tokens of a block (``blocksparse_block_size``).
            head_sliding_step: How far the columns move from head to head; negative: from KV head
                to KV head.
            num_heads: Query heads, on this rank.
            num_kv_heads: KV heads, on this rank; ``None``: as ``num_heads``.
            tp_rank: This rank among those that share the heads.
            device: Where the mask is made.

        Raises:
            ShapeError: A number is out of range; the message names it.
        """
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        sizes = {"query_len": query_len, "local_blocks": local_blocks, "tp_rank": tp_rank}
        positive = {"seq_len": seq_len, "vert_stride": vert_stride, "block_size": block_size}
        positive |= {"num_heads": num_heads, "num_kv_heads": kv_heads}
        for least, named in ((0, sizes), (1, positive)):
            for name, value in named.items():
                if not _is_integer(value, least=least):
                    raise ShapeError(f"{name} is {value!r}, expected an integer, {least} or more")
        if query_len > seq_len:
            raise ShapeError(f"query_len is {query_len}, expected at most seq_len={seq_len}")
        if num_heads % kv_heads:
            raise ShapeError(
                f"num_heads is {num_heads}, expected a multiple of {kv_heads} KV heads"
            )
        # Blocks of rows, none of which crosses the border of two blocks of positions.
        first = seq_len - query_len
        block_q = math.gcd(first, block_size)
        rows = torch.arange(0, query_len, block_q, device=device)
        own = (first + rows) // block_size
        block = torch.arange(-(-seq_len // block_size), device=device)
        heads = torch.arange(num_heads if head_sliding_step else 1, device=device)
        if head_sliding_step >= 0:
            offset = (tp_rank * num_heads + heads) * head_sliding_step + 1
        else:
            kv_head = heads // (num_heads // kv_heads)
            offset = (tp_rank * kv_heads + kv_head) * -head_sliding_step + 1
        is_local = block > own[:, None] - local_blocks
        is_strided = (block + offset[:, None]) % vert_stride == 0
        mask = is_local[None] | is_strided[:, None]
        return BlockMask(mask[None], block_q, block_size)
