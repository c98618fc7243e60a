"""The public operation: contract, defaults, and the choice of an implementation."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...device import DeviceInfo
from ...errors import UnsupportedError
from ...shapes import form, is_debugging
from ...tiles.state import AttentionOutput
from ..attention_checks import as_number, check_flag, default_scale, whole_window
from ..dispatch import choose, explain
from ..eager import call_uncompiled, check_readable, needs_operator
from . import operator, shared_prefixes
from .batch import PagedBatch, SharedPrefixes
from .checks import TENSORS, check_plan, check_types, validate
from .plan import Plan
from .problem import Arguments, CachedCall, CallForm, Problem, form_of, has_aligned_scales

IMPLEMENTATIONS = ("hopper", "hopper_prefill", "triton", "cpu", "reference")
"""Modules of this package, in the order in which ``impl="auto"`` tries them.

Each has the same functions: ``supports(problem, device)`` returns a reason or None,
``make_plan(problem, device, batch_invariant=...)`` a plan, ``prepare(problem, form, plan)`` a
function from ``Arguments`` to ``AttentionOutput``. ``reference`` runs all, without a plan.
"""


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
    visible_blocks: Tensor | None = None,
    out: Tensor | None = None,
    plan: Plan | None = None,
    impl: str = "auto",
) -> AttentionOutput:
    """Attention of new tokens over a paged KV cache.

    Row ``t`` of sequence ``i`` stands at position ``seq_len - query_len + t`` and sees every key
    at or before it. One call serves prefill, chunked prefill, decode and any mix of them. For 2
    new tokens of a sequence of 5 the mask is (1 = visible):

        1 1 1 1 0
        1 1 1 1 1

    A score is ``q · k * softmax_scale``, then capped, then biased, then masked. What lies in
    unused slots, unused blocks and table tails never reaches the output, and the same inputs
    give the same bits on every call.

    Args:
        q: ``[num_tokens, num_heads, head_size]`` float32, float16 or bfloat16 (float64 on the
            reference, with caches like it). Queries of all
            sequences, in the order of ``batch.cu_seqlens_q``. The last dimension is contiguous,
            here and below; other strides are free.
        k_cache: ``[num_blocks, block_size, num_kv_heads, head_size]``, any of these types, or
            float8_e4m3fn, float8_e5m2 or int8 with scales. The keys of the new tokens are already
            in it (see ``write_kv``). ``block_size`` 1 to 256, ``head_size`` a multiple of 8 up to
            512, ``num_kv_heads`` any divisor of ``num_heads``.
        v_cache: ``[num_blocks, block_size, num_kv_heads, v_head_size]``, the type of ``k_cache``.
        batch: Lengths and block tables.
        softmax_scale: Multiplies ``q · k``. ``None`` is ``head_size ** -0.5``; 0.0 means 0.0.
        causal: Whether a token sees only keys at or before its own position.
        sliding_window: Number of visible keys up to the query's own, which counts; those after it
            are hidden by ``causal`` only. ``None``: all.
        logits_soft_cap: Scores become ``cap * tanh(score / cap)``. ``None``: no cap.
        alibi_slopes: ``[num_heads]``, floating; adds ``slope * (key position - query position)``.
        sinks: ``[num_heads]``, floating; one more logit in each head's softmax, with no value. It
            counts in ``lse``.
        k_scale: float32, with an 8-bit ``k_cache`` and only then: a key is its elements times
            this. One number for all, ``[num_kv_heads]``, or for each token
            ``[num_blocks, block_size, num_kv_heads]``, any strides.
        v_scale: The same for ``v_cache``, of the same kind.
        visible_blocks: int32 ``[num_seqs, num_kv_heads, max_visible]``: for each KV head of a
            sequence the only blocks whose keys its rows see, of those that the other options let
            them see. Logical numbers (columns of ``block_tables``), ascending, then -1. Time
            follows the number of visible blocks. ``None``: all blocks.
        out: Where to write the result, ``[num_tokens, num_heads, v_head_size]`` like ``q``.
        plan: How to divide the work (``plan_paged_attention``); ``None`` chooses the fastest.
            ``torch.compile`` makes a call without a plan a graph node; one with a plan breaks the
            graph.
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

    On a CPU the first call with each combination of element types compiles for some 10 seconds;
    the result is kept on disk.

    It has no gradients, because a cache is written in place: a ``q`` that requires one warns once.
    ``pagetile.attention`` has gradients.

    On a GPU the values of lengths and tables are checked under ``PAGETILE_DEBUG=1`` only, since
    the check waits for the device. Without it a wrong value reads or writes out of bounds.

    Examples:
        >>> import torch
        >>> k_cache, v_cache = torch.randn(2, 10, 16, 2, 64).unbind(0)
        >>> tables = torch.tensor([[3, 8], [5, 0]], dtype=torch.int32)
        >>> lengths = torch.tensor([30, 7], dtype=torch.int32)
        >>> batch = PagedBatch.decode(tables, lengths, max_seq_len=30)
        >>> paged_attention(torch.randn(2, 8, 64), k_cache, v_cache, batch).out.shape
        torch.Size([2, 8, 64])
    """
    if plan is not None and torch.compiler.is_compiling():
        result: AttentionOutput = call_uncompiled(
            paged_attention, q, k_cache, v_cache, batch, softmax_scale=softmax_scale,
            causal=causal, sliding_window=sliding_window, logits_soft_cap=logits_soft_cap,
            alibi_slopes=alibi_slopes, sinks=sinks, k_scale=k_scale, v_scale=v_scale,
            visible_blocks=visible_blocks, out=out, plan=plan, impl=impl,
        )  # fmt: skip
        return result
    sliding_window = whole_window(sliding_window)
    if isinstance(softmax_scale, Tensor):  # a prepared launch keeps the number
        softmax_scale = as_number("softmax_scale", softmax_scale)
    if causal is not True and causal is not False:  # 1 has the same hash as True
        check_flag("causal", causal)
    numbers = causal, sliding_window, logits_soft_cap
    optional = alibi_slopes, sinks, k_scale, v_scale, visible_blocks, out
    try:
        if plan is None and needs_operator(q):
            scale = default_scale(q) if softmax_scale is None else softmax_scale
            arguments = Arguments(q, k_cache, v_cache, batch, scale, *numbers, *optional)
            if q.is_meta:  # no kernel will validate it
                _find_call(arguments, plan, impl)
            return operator.attend(arguments, impl)
        if alibi_slopes is sinks is k_scale is v_scale is visible_blocks is out is None:
            key: tuple[Any, ...] = softmax_scale, *numbers, plan, impl
        else:
            forms = [None if tensor is None else form(tensor) for tensor in optional]
            key = softmax_scale, *numbers, *forms, has_aligned_scales(k_scale, v_scale), plan, impl
        call = batch.calls.get(key)
        if call is None or not call.matches(q, k_cache, v_cache, out):
            scale = default_scale(q) if softmax_scale is None else softmax_scale
            arguments = Arguments(q, k_cache, v_cache, batch, scale, *numbers, *optional)
            call = _find_call(arguments, plan, impl, key)
        if out is not None:
            call.check_out(out, q, k_cache, v_cache)
        scale = call.softmax_scale if softmax_scale is None else softmax_scale
        # Arguments._make, without the function call.
        arguments = tuple.__new__(
            Arguments, (q, k_cache, v_cache, batch, scale, *numbers, *optional)
        )
        if is_debugging() and q.is_cuda:
            check_on_host(call.problem, batch, call.num_blocks, visible_blocks)
        result = call.run(arguments)
        return result
    except (AttributeError, TypeError, RuntimeError):  # look closer after a failure only: faster
        tensors = {
            "q": q, "k_cache": k_cache, "v_cache": v_cache, "alibi_slopes": alibi_slopes,
            "sinks": sinks, "k_scale": k_scale, "v_scale": v_scale,
            "visible_blocks": visible_blocks, "out": out,
        }  # fmt: skip
        check_types(batch, **tensors)
        check_readable("paged_attention", **tensors)
        if softmax_scale is not None:
            as_number("softmax_scale", softmax_scale)
        if logits_soft_cap is not None:
            as_number("logits_soft_cap", logits_soft_cap)
        check_plan(plan, impl)
        raise


def _find_call(arguments: Arguments, plan: Plan | None, impl: str, key: Any = None) -> CachedCall:
    """Return the cached call for these arguments; validate and dispatch them if there is none.

    The fast path is the batch's own cache, whose ``key`` is every argument but ``q`` and the
    caches; torch guards compare these three (``CachedCall.matches``). This is the slow path: it
    describes the whole call and looks it up among all. A call is recorded for the fast path when
    it comes twice in a row, so calls that do not repeat are not slower (decision 20).
    """
    q, k_cache, v_cache, batch = arguments[:4]
    if torch._C._are_functorch_transforms_active():
        check_readable("paged_attention", **arguments._asdict())
    if q.requires_grad and torch.is_grad_enabled():
        _warn_of_no_gradient()
    call = _dispatch(form_of(arguments), plan, impl)
    call.check_others(arguments)
    if key is not None:
        if batch.calls.get(key) is call:  # the second time in a row
            call.record(q, k_cache, v_cache)
        batch.remember(key, call)
    return call


@functools.lru_cache(maxsize=1024)
def _dispatch(form: CallForm, plan: Plan | None, impl: str) -> CachedCall:
    """Validate a form, choose the implementation, and prepare all that its calls share."""
    problem = validate(form)
    if not isinstance(form.softmax_scale, float):  # an equal float finds this entry
        form = form._replace(softmax_scale=float(form.softmax_scale))
    device = DeviceInfo.of(form.q.device)
    name, module = choose_implementation(problem, device, impl)
    if form.shared_prefixes is not None and name != "reference":
        if plan is not None:
            raise UnsupportedError(
                "plan with shared_prefixes: pass plan=None, or a batch without shared_prefixes"
            )
        if form.sliding_window is None:  # a window hides most of a long prefix
            run = functools.partial(_run_shared, problem, impl)
            return CachedCall(form, problem, run)
    check_plan(plan, impl, runs=name)
    run = module.prepare(problem, form, plan)
    if name == "reference":
        run = functools.partial(_run_reference, problem, form.k_cache.shape[0], run)
    return CachedCall(form, problem, run)


def _run_reference(
    problem: Problem, num_blocks: int, run: Callable[[Arguments], AttentionOutput], call: Arguments
) -> AttentionOutput:
    """Check the values as other implementations do; it waits for a GPU anyway."""
    check_on_host(problem, call.batch, num_blocks, call.visible_blocks)
    if call.batch.shared_prefixes is not None:
        check_prefixes_on_host(problem, call.batch, call.batch.shared_prefixes)
    return run(call)


def _run_shared(problem: Problem, impl: str, call: Arguments) -> AttentionOutput:
    """Run a call whose batch has shared prefixes: in two passes where that is faster."""

    def attend(arguments: Arguments) -> AttentionOutput:
        return _find_call(arguments, None, impl).run(arguments)

    shared, device = call.batch.shared_prefixes, DeviceInfo.of(call.q.device)
    assert shared is not None
    if device.kind == "cpu" or is_debugging():
        check_prefixes_on_host(problem, call.batch, shared)
    if shared_prefixes.saves_time(problem, shared, device):
        return shared_prefixes.run(problem, attend, call, impl)
    return attend(call._replace(batch=dataclasses.replace(call.batch, shared_prefixes=None)))


def choose_implementation(problem: Problem, device: DeviceInfo, impl: str) -> tuple[str, Any]:
    """Return the name of the implementation that runs, and its module."""
    module = choose(__package__, IMPLEMENTATIONS, problem, device, impl)
    return module.__name__.rpartition(".")[2], module


@functools.cache
def _warn_of_no_gradient() -> None:
    """Warn once a process."""
    warnings.warn(
        "q requires a gradient, but paged_attention has none: a KV cache is written in place. Use "
        "pagetile.attention for training, or call it under torch.no_grad()",
        UserWarning,
        stacklevel=4,
    )


def check_on_host(
    problem: Problem, batch: PagedBatch, num_blocks: int, visible_blocks: Tensor | None = None
) -> None:
    """Raise ShapeError for a length or block out of the tensors' bounds; waits for a GPU."""
    from ...tiles.cpu.arrays import flat
    from .value_checks import check_values, check_visible_blocks

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
    if visible_blocks is not None:
        check_visible_blocks(visible_blocks.cpu(), host.seq_lens, problem.block_size)


def check_prefixes_on_host(problem: Problem, batch: PagedBatch, shared: SharedPrefixes) -> None:
    """Raise ShapeError for groups or prefixes that are not valid; waits for a GPU."""
    from .value_checks import check_shared_prefixes

    on_host = SharedPrefixes(shared.cu_group_seqs.cpu(), shared.prefix_lens.cpu())
    host = PagedBatch(
        batch.block_tables.cpu(), batch.seq_lens.cpu(), batch.cu_seqlens_q.cpu(),
        batch.max_query_len, batch.max_seq_len, on_host,
    )  # fmt: skip
    check_shared_prefixes(host, problem.block_size)


def explain_paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: PagedBatch, **options: Any
) -> str:
    """Return which implementations can run a call, one a line, in the order of ``impl="auto"``.

    With shared prefixes this is about each sequence's own keys: see ``SharedPrefixes``.

    Args:
        q: As for ``paged_attention``.
        k_cache: As for ``paged_attention``.
        v_cache: As for ``paged_attention``.
        batch: As for ``paged_attention``.
        **options: The keyword arguments of ``paged_attention``; ``impl`` is ignored.

    Examples:
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
    problem = _validate(q, k_cache, v_cache, batch, options)
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
    """Return the launch plan that ``paged_attention`` would use for a call; its ``plan`` takes it.

    A plan is for calls of the same sizes, types and bounds (``max_query_len``, ``max_seq_len``),
    whatever their lengths are, and for the implementation that runs this call.

    Args:
        q: As for ``paged_attention``.
        k_cache: As for ``paged_attention``.
        v_cache: As for ``paged_attention``.
        batch: As for ``paged_attention``.
        batch_invariant: Whether a sequence's result must have the same bits whatever other
            sequences are in the batch, among batches of one ``max_query_len``. On a CPU it always
            has; on a GPU it costs some of decode's speed, and memory (``make_plan``).
        **options: The keyword arguments of ``paged_attention``, ``impl`` included; ``plan`` is
            ignored.

    Raises:
        ShapeError: As ``paged_attention``.
        DTypeError: As there.
        UnsupportedError: As there; or the reference runs, which is not planned, or the batch has
            shared prefixes, with which a call takes no plan.

    Examples:
        >>> import torch
        >>> k_cache, v_cache = torch.randn(2, 10, 16, 2, 64).unbind(0)
        >>> batch = PagedBatch.of([[3, 8], [5]], [30, 7])
        >>> q = torch.randn(2, 8, 64)
        >>> plan = plan_paged_attention(q, k_cache, v_cache, batch, batch_invariant=True)
        >>> paged_attention(q, k_cache, v_cache, batch, plan=plan).out.shape
        torch.Size([2, 8, 64])
    """
    impl = options.pop("impl", "auto")
    problem, device = _validate(q, k_cache, v_cache, batch, options), DeviceInfo.of(q.device)
    if batch.shared_prefixes is not None:
        raise UnsupportedError(
            "a call with shared_prefixes takes no plan: plan a batch without shared_prefixes"
        )
    name, implementation = choose_implementation(problem, device, impl)
    if name == "reference":
        raise UnsupportedError(
            "the reference runs this, which is not planned: explain_paged_attention says why the "
            "others cannot"
        )
    plan: Plan = implementation.make_plan(problem, device, batch_invariant=batch_invariant)
    return plan


def _validate(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: PagedBatch, options: dict[str, Any]
) -> Problem:
    """Return the problem of a call with these keyword arguments."""
    for name in ("plan", "impl"):
        options.pop(name, None)
    options.setdefault("softmax_scale", None)
    options["sliding_window"] = whole_window(options.get("sliding_window"))
    if unknown := sorted(options.keys() - set(Arguments._fields)):
        known = ", ".join(Arguments._fields[4:])
        raise TypeError(
            f"{unknown[0]} is not an option of paged_attention(): expected one of {known}"
        )
    arguments = Arguments(q, k_cache, v_cache, batch, **options)
    check_types(batch, **{name: getattr(arguments, name) for name in TENSORS})
    scale = arguments.softmax_scale
    scale = default_scale(q) if scale is None else as_number("softmax_scale", scale)
    return validate(form_of(arguments._replace(softmax_scale=scale)))
