"""Attention forward on Hopper with warp specialisation: loading warps and 2 or 3 warpgroups.

::

    out[r] = Σ_n p[r, n] v[n] / l[r],  p[r, n] = 2 ** (s[r, n] - m[r]),  s = q · k · scale · log2 e

The grid is persistent: a program computes tiles of queries one after another (``schedule``). Each
warpgroup has 64 of a tile's rows, tokens × ``PACK`` heads (the last ``64 % PACK`` rows are empty:
whatever they hold stays in them, and is not stored), and visits the keys from right to left,
masked tiles first; a tile's last product overlaps the next tile's first::

    loading      Q K2 K1 K0 │ Q' K1' K0' │ ...      and  V2 V1 V0 │ V1' V0' │ ...
    computing    S2 softmax │ S1 O2 softmax │ S0 O1 softmax │ S1' O0 softmax' │ S0' O1' ...

While one warpgroup computes a softmax, another multiplies (``PINGPONG``). One warp loads keys and
one values by TMA, in boxes of ``BOX`` rows: a page, a part of one, or, for ragged tensors, a tile.
If boxes would be small, two warps each gather rows instead (``gather``); rows of 8-bit caches are
always gathered, and converted on the way (``PACKED``), unless the previous kernel unpacked them
(``WAITS``). With ``STAGED`` full tiles of results are stored by TMA. No NaN from outside of a
sequence enters a product: rows past its end are zeros, or if gathered repeat the last key. If tiles
are few, programs may split a tile's keys (``SPLITS``, see ``splits`` and ``merge``). If queries
have a single slot in shared memory, a warpgroup releases its part after its last product with keys
(``EARLY``), so that the next queries arrive while it multiplies the last values.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .compute import compute_role
from .config import ROWS, KernelConfig
from .gather import GATHERING_WARPS, make_pages
from .gather_packed import HeadScales, make_token_scales
from .load import load_keys_role, load_values_role
from .metadata import make_tile_metadata
from .ring import make_ring
from .roles import specialise
from .schedule import Batch, TileLists, make_tile_queue
from .softmax import Scoring
from .splits import make_last_wave, make_split_schedule


@gluon.jit
def forward_kernel(
    # outputs
    out,  # [num_tokens, num_heads, V_SIZE]
    out_desc,  # out in boxes like q's, if STAGED
    lse,  # [num_tokens, num_heads] float32
    # inputs
    q_desc,  # [num_tokens, num_heads, head_size] in boxes of [64 // PACK, PACK, 64]
    k,  # [num_blocks, block_size, num_kv_heads, head_size] in boxes of [1, BOX, 1, 64]; or pointers
    v,
    slopes,  # [num_heads] float32, if HAS_ALIBI
    sinks,  # [num_heads] float32, if HAS_SINKS
    # metadata
    cu_seqlens_q,  # [num_seqs + 1]
    lengths,  # seq_lens [num_seqs] if paged, else cu_seqlens_k [num_seqs + 1]
    block_tables,  # [num_seqs, max_blocks_per_seq]
    lists,  # int32 [num_seqs or 1, num_heads or 1, seq_tiles, list_pitch], if SPARSE
    drawn,  # int32 [1] of 0, left as 0, if DRAWS: see ``TileQueue``
    # scalars
    num_seqs,
    block_rows,
    num_heads,
    group,
    num_tiles,
    seq_tiles,
    short,
    window,
    scale,  # of products; with a cap, of their tanh
    inner,  # of products before tanh, with a cap
    list_pitch,
    # strides
    list_seq,  # in records
    list_head,
    table_stride,
    token_stride,
    head_stride,
    k_block,  # of the caches, if GATHER
    k_slot,
    k_head,
    v_block,
    v_slot,
    v_head,
    # scales of packed caches
    k_scale,  # float32 [num_kv_heads] or [num_blocks, block_size, num_kv_heads]
    v_scale,
    ks_block,
    ks_slot,
    ks_head,
    vs_block,
    vs_slot,
    vs_head,
    # scratch memory if SPLITS: see ``SplitSchedule``
    accs,
    sums,
    arrivals,
    # constants
    HEAD_SIZE: gl.constexpr,
    V_SIZE: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    CAUSAL: gl.constexpr,
    HAS_WINDOW: gl.constexpr,
    HAS_CAP: gl.constexpr,
    HAS_ALIBI: gl.constexpr,
    HAS_SINKS: gl.constexpr,
    UNIFORM: gl.constexpr,
    WIDTH: gl.constexpr,
    V_WIDTH: gl.constexpr,
    KEY_TILES: gl.constexpr,
    PACK: gl.constexpr,
    BOX: gl.constexpr,
    ATOMS: gl.constexpr,
    GATHER: gl.constexpr,
    TILE_N: gl.constexpr,
    WARPGROUPS: gl.constexpr,
    Q_STAGES: gl.constexpr,
    STAGES: gl.constexpr,
    STAGED: gl.constexpr,
    PINGPONG: gl.constexpr,
    REGISTERS: gl.constexpr,
    SPARSE: gl.constexpr,
    SPLITS: gl.constexpr,
    DRAWS: gl.constexpr,
    EARLY: gl.constexpr,
    HOLDS_Q: gl.constexpr,
    PACKED: gl.constexpr,
    SCALES: gl.constexpr,
    WAITS: gl.constexpr,  # whether it is launched before the previous kernel ends
):
    """See the module docstring. Grid: at most one program per multiprocessor."""
    gdc_launch_dependents()
    # float16 holds all 8-bit values, and converting to it takes fewer instructions than bfloat16.
    V_DTYPE: gl.constexpr = gl.float16 if SCALES == "head" else q_desc.dtype
    BOUNDED: gl.constexpr = HAS_CAP and not HAS_ALIBI and gl.bfloat16 == V_DTYPE
    config = KernelConfig(
        HEAD_SIZE, V_SIZE, BLOCK_SIZE, BOX, ATOMS, GATHER, PACK, WARPGROUPS,
        WARPGROUPS * (ROWS // PACK), CAUSAL, HAS_WINDOW, HAS_CAP, HAS_ALIBI, HAS_SINKS, UNIFORM,
        STAGED, PINGPONG, SPARSE, SPLITS, KEY_TILES, DRAWS, EARLY, PACKED, SCALES, HOLDS_Q, BOUNDED,
    )  # fmt: skip
    batch = Batch(
        cu_seqlens_q, lengths, block_tables, table_stride, num_seqs, block_rows,
        num_tiles, seq_tiles, num_heads // PACK, group, short, window,
        TileLists(lists, list_seq, list_head, list_pitch),
    )  # fmt: skip
    scoring = Scoring(window, scale, inner, slopes, lists)
    q_ring = make_ring(
        q_desc.dtype,
        ROWS,
        WIDTH,
        Q_STAGES,
        WARPGROUPS * KEY_TILES,
        1 if EARLY else WARPGROUPS,
        WARPGROUPS if EARLY else 1,
    )
    k_ring = make_ring(q_desc.dtype, TILE_N, WIDTH, STAGES, KEY_TILES, WARPGROUPS)
    v_ring = make_ring(V_DTYPE, TILE_N, V_WIDTH, STAGES, 1, WARPGROUPS)
    metadata = make_tile_metadata(
        4 if EARLY else Q_STAGES, 16 if SPARSE or SPLITS or SCALES == "head" else 8
    )
    schedule = ()
    if SPLITS and DRAWS:
        schedule = make_last_wave(
            batch, accs, sums, arrivals, config.TOKENS, TILE_N, V_WIDTH, config
        )
    elif SPLITS:
        schedule = make_split_schedule(
            batch, accs, sums, arrivals, config.TOKENS, TILE_N, V_WIDTH, CAUSAL,
            HAS_WINDOW,
        )  # fmt: skip
    queue = ()
    if DRAWS:
        queue = make_tile_queue(drawn)
    staged = ()
    if STAGED:
        LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
        staged = (  # type: ignore[assignment]
            out_desc, gl.allocate_shared_memory(q_desc.dtype, [WARPGROUPS, ROWS, V_WIDTH], LAYOUT)
        )  # fmt: skip
    if GATHER:
        k = make_pages(k, k_block, k_slot, k_head, TILE_N)
        v = make_pages(v, v_block, v_slot, v_head, TILE_N)
    k_scales = ()
    if SCALES == "head":
        k, v = (k, (HeadScales(k_scale, v_scale, ks_head, vs_head),)), (v, ())
    elif SCALES == "token":
        of_keys = make_token_scales(
            k_scale, ks_block, ks_slot, ks_head, TILE_N, 2 * STAGES, False
        )  # fmt: skip
        of_values = make_token_scales(v_scale, vs_block, vs_slot, vs_head, TILE_N, 1, True)
        k_scales = (of_keys,)  # type: ignore[assignment]
        k, v = (k, k_scales), (v, (of_values,))
    fence_async_shared()
    if WAITS:  # only lengths have been read so far, which the previous kernel does not write
        gdc_wait()
    compute = (
        out, staged, lse, sinks, num_heads, token_stride, head_stride, scoring, schedule,
        metadata, q_ring, k_ring, v_ring, k_scales, config,
    )  # fmt: skip
    # Loading warps get the registers that warpgroups leave, in multiples of eight.
    EVEN: gl.constexpr = 65536 // (WARPGROUPS + 1) // 128 // 8 * 8
    LOADING: gl.constexpr = GATHERING_WARPS if GATHER else 1
    LOAD: gl.constexpr = (WARPGROUPS + 1) * EVEN - WARPGROUPS * REGISTERS
    keys = q_desc, k, batch, schedule, queue, metadata, q_ring, k_ring, config
    values = v, batch, schedule, queue, v_ring, config
    specialise(
        compute_role, compute, WARPGROUPS, 4, REGISTERS,
        [(load_keys_role, keys), (load_values_role, values)], LOADING, LOAD,
    )  # fmt: skip
