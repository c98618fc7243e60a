"""The host's rule for splitting a tile's keys among CTAs, and the constants of its cost model.

It uses host integers only; the kernel itself decides from the lengths (``splits``).
"""

from __future__ import annotations

from .tiling import Tiling

LEAST_KEYS = 1024
"""Fewest keys of a split, unless it is its tile's last."""

MOST_MIXED_KEYS = 8 * LEAST_KEYS
"""Up to this many keys of the longest sequence of a mixed batch, which is likely a decoding one,
keys are not split: the kernel with splits starts later, since it has twice the instructions (15 µs
on an H100, if they are not in its caches)."""

MOST_SPLITS = 32
"""Most splits of one tile."""

MOST_SEQS = 2048
"""Most sequences of a batch whose keys are split: shared memory holds an integer for each."""

MOST_DRAWN_SEQS = 32
"""Most sequences of unequal lengths that are sorted by their keys: a warp has a lane for each."""

SLOTS = 512
"""Most partial results of a launch: 32 MiB for heads of up to 128, 64 MiB for wider ones."""

# In tiles of keys that a multiprocessor computes (about 1.2 µs); estimated, see decision 30.
ITEM_COST = 2.0
SPLIT_COST = 3.0
MERGE_COST = 0.75  # for values of 128

_ROWS = 64  # of a warpgroup
_USUAL_PACK = 8  # heads in a tile
_USUAL_TOKENS = 1024  # of a sequence; batches with longer ones likely have shorter ones, too
_DIVIDING_WARPGROUPS = 2  # of kernels that split keys
_LONG_KEYS = 10_240  # fewest keys for which splitting the tiles of a last wave is worthwhile
_WAVES_GAIN = 1.12  # least ratio of the time of whole waves to that of an even distribution


def tokens_of(tiling: Tiling, pack: int) -> int:
    """Return how many query tokens a tile has, with ``pack`` heads of each."""
    return tiling.warpgroups * (_ROWS // pack)


def pack_of(group: int, max_query_len: int, tiling: Tiling) -> int:
    """Return how many query heads share a tile: more when there are few tokens to fill it.

    The divisor of ``group`` for which a KV head has the fewest tiles, if half of a sequence's last
    tile is empty. Heads that do not divide a warpgroup's 64 rows leave the rest of them empty, too.

    Up to eight even where one head's tokens would fill it, because then fewer rows of a sequence's
    last tile are empty, and fewer keys of a tile are masked.
    """
    packs = [pack for pack in range(1, _ROWS + 1) if group % pack == 0]
    if group % _USUAL_PACK == 0:
        packs = [pack for pack in packs if _ROWS % pack == 0]
    num_tokens = min(max_query_len, _USUAL_TOKENS)

    def count_tiles(pack: int) -> float:
        return (num_tokens / tokens_of(tiling, pack) + 0.5) * (group // pack)

    return min(
        (pack for pack in packs if pack <= _USUAL_PACK or max_query_len <= tokens_of(tiling, pack)),
        key=count_tiles,
    )


def divides_keys(
    tiling: Tiling,
    num_programs: int,
    *,
    num_seqs: int,
    num_tokens: int,
    max_query_len: int,
    max_seq_len: int,
    num_heads: int,
    group: int,
    short: int,
) -> bool:
    """Return whether a batch may leave multiprocessors idle that splits of keys could occupy.

    True if the host's bounds allow fewer than one and a half waves of tiles, and if queries may see
    more than two splits' keys on average. True, too, if the last wave is far from full and keys are
    long: then only that wave's tiles are split (for heads of 64 and capped scores the kernel with
    splits has slower tiles). Otherwise the kernel without splits runs.

    Args:
        tiling: Tiling of the kernel.
        num_programs: Number of multiprocessors.
        num_seqs: Number of sequences.
        num_tokens: New tokens of all sequences.
        max_query_len: Upper bound of a sequence's new tokens.
        max_seq_len: Upper bound of a sequence's keys.
        num_heads: Query heads.
        group: Query heads of a KV head.
        short: Sequences with up to this many new tokens are left to another launch.
    """
    if num_seqs > MOST_SEQS or 2 * max_seq_len - max_query_len <= 4 * LEAST_KEYS:
        return False
    pack = pack_of(group, max_query_len, tiling)
    tokens, heads = tokens_of(tiling, pack), num_heads // pack
    if num_tokens == num_seqs * max_query_len:
        items = num_seqs * -(-max_query_len // tokens) * heads
    else:  # all sequences but one may be short
        if max_seq_len <= MOST_MIXED_KEYS:
            return False
        items = max(0, num_tokens - (num_seqs - 1) * short) * heads // tokens
    if 2 * items < 3 * num_programs:
        return True
    if (
        tiling.warpgroups > _DIVIDING_WARPGROUPS
        or num_seqs > MOST_DRAWN_SEQS
        or max_seq_len < _LONG_KEYS
    ):
        return False
    return -(-items // num_programs) * num_programs >= _WAVES_GAIN * items
