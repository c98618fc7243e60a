"""The public operation: contract, defaults, and the choice of an implementation."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from ...device import DeviceInfo
from ...shapes import is_debugging
from ...tiles.state import AttentionOutput
from ..attention_checks import check_flag, default_scale, whole_window
from ..dispatch import explain
from ..eager import call_uncompiled, wants_operator
from . import operator
from .checks import check, check_kinds, check_scalars, describe, form_of, forms_of
from .plan import Plan, make_plan
from .problem import Options, PagedBatch, Problem
from .settled import IMPLEMENTATIONS, Settled, choose_for, settle
from .triton_plan import make_gpu_plan


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: PagedBatch,
    *,
    softmax_scale: float | None = None,
    causal: bool = True,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    out: Tensor | None = None,
    plan: Plan | None = None,
    impl: str = "auto",
) -> AttentionOutput:
    """Attention of new tokens over a paged KV cache.

    Row ``t`` of sequence ``i`` stands at position ``seq_len - query_len + t`` and sees every key
    at or before it. One call serves prefill, chunked prefill, decode and any mix: a length is
    data. For 2 new tokens of a sequence of 5 the mask is (1 = visible)::

        1 1 1 1 0
        1 1 1 1 1

    A score is ``q · k * softmax_scale``, then capped, then biased, then masked. What lies in
    unused slots, unused blocks and table tails never reaches the output, and the same inputs
    give the same bits on every call.

    Args:
        q: ``[num_tokens, num_heads, head_size]`` float32, float16 or bfloat16 (float64 on the
            reference, with caches like it). Queries of all
            sequences, in the order of ``batch.cu_seqlens_q``. Last dimension contiguous, here and
            below; other strides are free.
        k_cache: ``[num_blocks, block_size, num_kv_heads, head_size]``, any of these types, or
            float8_e4m3fn, float8_e5m2 or int8 with scales. The keys of the new tokens are already
            in it (see ``write_kv``). ``block_size`` 1 to 256, ``head_size`` a multiple of 8 up to
            512, ``num_kv_heads`` any divisor of ``num_heads``.
        v_cache: ``[num_blocks, block_size, num_kv_heads, v_head_size]``, the type of ``k_cache``.
        batch: Lengths and block tables.
        softmax_scale: Multiplies ``q · k``. ``None`` is ``head_size ** -0.5``; 0.0 means 0.0.
        causal: Whether a token sees only keys at or before its own position.
        sliding_window: Number of visible keys up to the query's own, which counts; those after it
            are ``causal``'s to hide. ``None``: all.
        logits_soft_cap: Scores become ``cap * tanh(score / cap)``. ``None``: no cap.
        alibi_slopes: ``[num_heads]``, floating; adds ``slope * (key position - query position)``.
        sinks: ``[num_heads]``, floating; one more logit in each head's softmax, with no value. It
            counts in ``lse``.
        k_scale: float32, with an 8-bit ``k_cache`` and only then: a key is its elements times
            this. One number for all, ``[num_kv_heads]``, or for each token
            ``[num_blocks, block_size, num_kv_heads]``, any strides.
        v_scale: The same for ``v_cache``, of the same kind.
        out: Where to write the result, ``[num_tokens, num_heads, v_head_size]`` like ``q``.
        plan: How to cut the work (``plan_paged_attention``); ``None`` chooses, for speed.
            ``torch.compile`` takes a call without one as a node, and breaks at others.
        impl: ``"auto"``, or one of ``"hopper"`` (decode), ``"hopper_prefill"``, ``"triton"``,
            ``"cpu"``, ``"reference"``: a named one runs or raises.

    Returns:
        ``AttentionOutput(out, lse)``; ``lse`` float32 ``[num_tokens, num_heads]``, natural
        logarithm. A row that sees no key (and no sink) has ``out`` 0 and ``lse`` -inf.

    Raises:
        ShapeError: Sizes disagree or are out of range; the message names the arguments.
        DTypeError: An argument has an element type that it does not take, or an 8-bit cache has
            no scales.
        UnsupportedError: The named ``impl`` cannot run this; the message says why.

    On a CPU the first call with each combination of element types compiles, once a machine, which
    takes some 20 seconds.

    It has no gradients, whatever ``q`` asks for: a cache is written in place (``attention`` has).

    On a GPU the values of lengths and tables are checked under ``PAGETILE_DEBUG=1`` only, since
    that waits for the device; without it a wrong one reads or writes memory that is not its own.

    Example:
        >>> import torch
        >>> k_cache, v_cache = torch.randn(2, 10, 16, 2, 64).unbind(0)
        >>> tables = torch.tensor([[3, 8], [5, 0]], dtype=torch.int32)
        >>> lengths = torch.tensor([30, 7], dtype=torch.int32)
        >>> batch = PagedBatch.decode(tables, lengths, max_seq_len=30)
        >>> paged_attention(torch.randn(2, 8, 64), k_cache, v_cache, batch).out.shape
        torch.Size([2, 8, 64])
    """
    if plan is not None and torch.compiler.is_compiling():
        return call_uncompiled(
            paged_attention, q, k_cache, v_cache, batch, softmax_scale=softmax_scale,
            causal=causal, sliding_window=sliding_window, logits_soft_cap=logits_soft_cap,
            alibi_slopes=alibi_slopes, sinks=sinks, k_scale=k_scale, v_scale=v_scale, out=out,
            plan=plan, impl=impl,
        )  # fmt: skip
    sliding_window, tensors = whole_window(sliding_window), (alibi_slopes, sinks, k_scale, v_scale)
    if causal is not True and causal is not False:  # 1 would be looked up as True
        check_flag("causal", causal)
    numbers = causal, sliding_window, logits_soft_cap
    try:
        if wants_operator(q) and plan is None:
            options = _fill(q, softmax_scale, *numbers, *tensors)
            if q.is_meta:  # nobody checks it later
                settle(describe(q, k_cache, v_cache, batch, options, out), plan, impl)
            return AttentionOutput(*operator.attend(q, k_cache, v_cache, batch, options, out, impl))
        key = softmax_scale, *numbers, *forms_of(*tensors, out), plan, impl
        last = batch.calls.get(key)
        if last is not None and last.serves(q, k_cache, v_cache, out):
            call: Settled = last
        else:
            options = _fill(q, softmax_scale, *numbers, *tensors)
            description = describe(q, k_cache, v_cache, batch, options, out)
            call = settle(description, plan, impl)
            if last is call:  # and will come again
                call.learn(q, k_cache, v_cache)
            batch.remember(key, call)
    except (AttributeError, TypeError):  # asked for only then: a call is to cost little
        check_kinds(q, k_cache, v_cache, batch, tensors, out)
        check_scalars(softmax_scale, plan, impl)
        raise
    if is_debugging() and q.is_cuda:
        check_on_host(call.problem, batch, k_cache.shape[0])
    scale = call.softmax_scale if softmax_scale is None else softmax_scale
    return call.run(q, k_cache, v_cache, batch, Options._make((scale, *numbers, *tensors)), out)


def _fill(q: Tensor, softmax_scale: float | None, *others: Any) -> Options:
    return Options._make((default_scale(q) if softmax_scale is None else softmax_scale, *others))


def check_on_host(problem: Problem, batch: PagedBatch, num_blocks: int) -> None:
    """Raise ShapeError for a length or block id that leads out of the tensors; waits for a GPU."""
    from ...tiles.cpu.arrays import flat
    from .cpu_checks import check_values

    host = dataclasses.replace(
        batch,
        block_tables=batch.block_tables.cpu(),
        seq_lens=batch.seq_lens.cpu(),
        cu_seqlens_q=batch.cu_seqlens_q.cpu(),
    )
    check_values(
        problem, host, num_blocks, block_tables=flat(host.block_tables),
        seq_lens=host.seq_lens.numpy(), cu_seqlens_q=host.cu_seqlens_q.numpy(),
    )  # fmt: skip


def explain_paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: PagedBatch, **options: Any
) -> str:
    """Which implementations can run a call, one a line with the reason, in the order of "auto".

    Args:
        q: As for ``paged_attention``, like everything else here.
        k_cache: As there.
        v_cache: As there.
        batch: As there.
        **options: The keyword arguments of ``paged_attention``; ``impl`` changes nothing.

    Example:
        >>> import torch
        >>> cache = torch.zeros(4, 16, 2, 64, dtype=torch.float64)
        >>> lengths = torch.tensor([5], dtype=torch.int32)
        >>> batch = PagedBatch.decode(lengths[:, None] * 0, lengths, max_seq_len=5)
        >>> print(explain_paged_attention(torch.zeros(1, 4, 64).double(), cache, cache, batch))
        hopper: no, the tensors are on cpu
        hopper_prefill: no, the tensors are on cpu
        triton: no, the tensors are on cpu
        cpu: no, q is float64; float32, float16 and bfloat16 run
        reference: yes
    """
    problem = _describe(q, k_cache, v_cache, batch, options)
    return explain(__package__, IMPLEMENTATIONS, problem, DeviceInfo.of(q.device))


def plan_paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: PagedBatch,
    *,
    batch_invariant: bool = False,
    **options: Any,
) -> Plan:
    """How ``paged_attention`` would cut a call: for its ``plan``, and for those who want to see.

    A plan is for calls of the same sizes, types and bounds (``max_query_len``, ``max_seq_len``),
    whatever their lengths are.

    Args:
        q: As for ``paged_attention``, like everything else here.
        k_cache: As there.
        v_cache: As there.
        batch: As there.
        batch_invariant: Whether a sequence's result must have the same bits whoever else is in
            the batch, among batches of one ``max_query_len``. On a CPU it always has; on a GPU it
            costs some of decode's speed, and memory (``make_plan``).
        **options: The keyword arguments of ``paged_attention``, ``impl`` included: a plan is for
            one implementation. ``plan`` changes nothing.

    Raises:
        ShapeError: As ``paged_attention``.
        DTypeError: As there.
        UnsupportedError: As there.

    Example:
        >>> import torch
        >>> k_cache, v_cache = torch.randn(2, 10, 16, 2, 64).unbind(0)
        >>> batch = PagedBatch.of([[3, 8], [5]], [30, 7])
        >>> q = torch.randn(2, 8, 64)
        >>> plan = plan_paged_attention(q, k_cache, v_cache, batch, batch_invariant=True)
        >>> paged_attention(q, k_cache, v_cache, batch, plan=plan).out.shape
        torch.Size([2, 8, 64])
    """
    impl = options.pop("impl", "auto")
    problem, device = _describe(q, k_cache, v_cache, batch, options), DeviceInfo.of(q.device)
    name, _ = choose_for(problem, device, impl)
    if name in ("hopper", "hopper_prefill", "triton"):
        hopper = name == "hopper"
        return make_gpu_plan(problem, device, batch_invariant=batch_invariant, hopper=hopper)
    return make_plan(problem, device, batch_invariant=batch_invariant)


def _describe(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: PagedBatch, options: dict[str, Any]
) -> Problem:
    """What a call with these options asks for, checked."""
    out, _, _ = (options.pop(name, None) for name in ("out", "plan", "impl"))
    tensors = tuple(map(options.get, ("alibi_slopes", "sinks", "k_scale", "v_scale")))
    check_kinds(q, k_cache, v_cache, batch, tensors, out)
    if options.get("softmax_scale") is None:
        options["softmax_scale"] = default_scale(q)
    options["sliding_window"] = whole_window(options.get("sliding_window"))
    return check(form_of(describe(q, k_cache, v_cache, batch, Options(**options), out)))
