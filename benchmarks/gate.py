"""The correctness gate: rows of pagetile's and the peers' timed results, compared with float64.

A few rows of the result are computed in float64 from the keys and values in the pages. A row's
error is the distance of a head's vector, relative to its length: without one block of 16 keys the
worst of 32 heads is 16 % off in 4096 random keys and 4 % in 131 072; by rounding weights and
results to bfloat16 it is 0.3 % off, and 0.8 % are allowed.
"""

from __future__ import annotations

import importlib
import random
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from pagetile import PagedBatch

from .case import Check

MOST_SEQS, MOST_ROWS = 3, 16  # at random, besides the first, last and longest
PEER_ERROR = 2**-4
"""A peer may round weights to 8 bits; this only excludes that it computes something else."""


class Rows(NamedTuple):
    """Some rows of a result, and their expected values."""

    tokens: Tensor
    expected: Tensor
    """float64 ``[len(tokens), num_heads, v_head_size]``."""

    def error(self, out: Tensor) -> float:
        """The largest relative distance of a head's vector in the rows; infinite for NaN."""
        found = out[self.tokens].double()
        distance = (found - self.expected).norm(dim=-1)
        size = self.expected.norm(dim=-1).clamp(min=1e-30)
        return float((distance / size).nan_to_num(torch.inf).max())


def allowed_error(dtype: torch.dtype) -> float:
    """The relative error allowed for pagetile in a call whose queries are ``dtype``."""
    return float(torch.finfo(dtype).eps) + 1e-5


def expected_rows(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: PagedBatch,
    *,
    causal: bool = True,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    logits_soft_cap: float | None = None,
    seed: int = 0,
) -> Rows:
    """Some rows of some sequences in float64; arguments as of ``paged_attention``.

    The sequences are the first, the last, the longest and random ones; of each, the rows are the
    first, the last and random ones.
    """
    rng, starts, lengths = random.Random(seed), batch.cu_seqlens_q.tolist(), batch.seq_lens.tolist()
    filled = [seq for seq in range(len(lengths)) if starts[seq] < starts[seq + 1]]
    longest = max(filled, key=lambda seq: lengths[seq])
    picked = {longest, filled[0], filled[-1], *rng.sample(filled, min(MOST_SEQS, len(filled)))}
    tokens: list[int] = []
    expected = []
    for seq in sorted(picked):
        num_new, length = starts[seq + 1] - starts[seq], lengths[seq]
        some = rng.sample(range(num_new), min(MOST_ROWS, num_new))
        rows = sorted({0, num_new - 1, *some})
        blocks = batch.block_tables[seq, : -(-length // k_cache.shape[1])].long()
        k, v = (
            _widen(cache[blocks].flatten(0, 1)[:length], scale, blocks)
            for cache, scale in ((k_cache, k_scale), (v_cache, v_scale))
        )
        at = torch.tensor(rows, device=q.device)
        seen = torch.arange(length, device=q.device) <= length - num_new + at[:, None]
        expected.append(
            _attend(q[starts[seq] + at].double(), k, v, seen if causal else None, logits_soft_cap)
        )
        tokens += [starts[seq] + row for row in rows]
    return Rows(torch.tensor(tokens, device=q.device), torch.cat(expected))


def _widen(values: Tensor, scale: Tensor | None, blocks: Tensor) -> Tensor:
    """``[length, num_kv_heads, size]`` in float64, multiplied by its scales."""
    wide = values.double()
    if scale is None:
        return wide
    if scale.dim() == 3:  # of each token
        scale = scale[blocks].flatten(0, 1)[: len(values)]
    return wide * scale.double()[..., None]


def _attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, cap: float | None) -> Tensor:
    """``[rows, num_heads, v_head_size]`` of q ``[rows, num_heads, size]``."""
    group = q.shape[1] // k.shape[1]
    heads = []
    for head in range(q.shape[1]):
        scores = q[:, head] @ k[:, head // group].T * q.shape[-1] ** -0.5
        if cap:
            scores = cap * torch.tanh(scores / cap)
        if seen is not None:
            scores = scores.masked_fill(~seen, -torch.inf)
        heads.append(scores.softmax(-1) @ v[:, head // group])
    return torch.stack(heads, dim=1)


def chosen(explanation: str) -> str:
    """The implementation that runs, from what an ``explain_…`` function returns."""
    lines = explanation.splitlines()
    return next(line.partition(":")[0] for line in lines if line.endswith(": yes"))


def check_timed_call(call: Callable[..., Any], impl: str, rows: Rows, what: str) -> list[Check]:
    """Compare a call's rows with float64, and its bits with a call that names its implementation.

    Args:
        call: The timed call; ``call(impl=...)`` names the implementation. Returns ``out, lse``.
        impl: The implementation that "auto" is expected to choose.
        rows: What is expected.
        what: The problem in words.
    """
    timed, named = call(), call(impl=impl)
    # Results of 16 bits may be equal by rounding; the log-sum-exp has 32.
    is_same = torch.equal(timed.out, named.out) and torch.equal(timed.lse, named.lse)
    return [
        check_rows(lambda: timed, rows, f"{impl}: {what}"),
        Check(f"the timed call runs {impl}", is_same, "compared bit by bit"),
    ]


def check_rows(call: Callable[..., Any], rows: Rows, what: str) -> Check:
    """Compare a call's rows with float64.

    Args:
        call: The timed call; returns ``out, lse``.
        rows: What is expected.
        what: The problem in words.
    """
    timed = call()
    error, allowed = rows.error(timed.out), allowed_error(timed.out.dtype)
    detail = f"relative error {error:.2g} in {len(rows.tokens)} rows, allowed {allowed:.2g}"
    return Check(what, error <= allowed, detail)


def check_kernel(operation: str, call: Callable[[], Any]) -> Check:
    """Name the implementation that a call runs, for an operation without ``explain_…``.

    Args:
        operation: Name of its folder under ``pagetile.ops``.
        call: The timed call.
    """
    entered: list[str] = []
    api = importlib.import_module(f"pagetile.ops.{operation}.api")
    # Calls may have been prepared before, and would not pass through the functions patched here.
    is_prepared = hasattr(api, "_prepare")
    function = "prepare" if is_prepared else "run"

    def recorded(name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        def record(*arguments: Any, **options: Any) -> Any:
            entered.append(name)
            return inner(*arguments, **options)

        return record

    with ExitStack() as stack:
        for name in ("triton", "cpu", "reference"):
            try:
                module = importlib.import_module(f"pagetile.ops.{operation}.{name}")
            except ImportError:
                continue
            replacement = recorded(name, getattr(module, function))
            stack.enter_context(mock.patch.object(module, function, replacement))
        if is_prepared:
            api._prepare.cache_clear()
            api._calls.clear()
        call()
    names = sorted(set(entered))  # a call may enter one several times
    is_kernel = len(names) == 1 and names != ["reference"]
    return Check(f"the timed call runs {' and '.join(names) or 'nothing'}", is_kernel, "")


def check_calls(
    what: str,
    step: Callable[[], object],
    caller: ModuleType,
    function: str,
    chooser: ModuleType,
    *,
    at_least: int = 1,
    may_be_reference: bool = False,
) -> Check:
    """Name the implementations that the calls inside a model's step run, and verify them.

    Each call is repeated twice on copies of its arguments: as the model makes it, and with the
    implementation named that the model's own call chose. Results and gradients must be equal in
    every bit.

    Args:
        what: The calls, in words.
        step: The timed step.
        caller: The module whose global name ``function`` the model calls.
        function: A function with an argument ``impl``.
        chooser: The module in which ``dispatch.choose`` is called for it.
        at_least: How many calls a step makes.
        may_be_reference: Whether the reference may run: the operation has no kernel here.
    """
    original, choose = getattr(caller, function), chooser.choose
    entered: list[str] = []
    chosen_names: Counter[str] = Counter()
    num_differing = 0

    def record_choice(*arguments: Any) -> Any:
        module = choose(*arguments)
        entered.append(module.__name__.rpartition(".")[2])
        return module

    def record_call(*arguments: Any, **options: Any) -> Any:
        nonlocal num_differing
        entered.clear()
        result = original(*arguments, **options)
        names = set(entered)
        chosen_names.update(names or {"nothing"})
        if len(names) != 1:  # "auto" called no implementation, or several
            num_differing += 1
            return result
        as_it_is = _with_gradients(original, arguments, options)
        named = _with_gradients(original, arguments, options | {"impl": names.pop()})
        num_differing += not all(map(torch.equal, as_it_is, named))
        return result

    with (
        mock.patch.object(chooser, "choose", record_choice),
        mock.patch.object(caller, function, record_call),
    ):
        step()
    counted = " and ".join(f"{name} ({count})" for name, count in sorted(chosen_names.items()))
    num_calls = sum(chosen_names.values())
    is_kernel = "nothing" not in chosen_names and (
        may_be_reference or "reference" not in chosen_names
    )
    return Check(
        f"{what} of the timed step run {counted or 'nothing'}",
        is_kernel and num_calls >= at_least and not num_differing,
        f"{num_calls} calls, expected {at_least} or more; {num_differing} differ from the named "
        "implementation in a bit of the result or of a gradient",
    )


def _with_gradients(
    function: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]
) -> list[Tensor]:
    """The result of a call on copies, and the gradients of its tensors that require them."""
    leaves: list[Tensor] = []

    def copy(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        leaf = value.detach()
        if value.requires_grad:
            leaves.append(leaf.requires_grad_())
        return leaf

    with torch.enable_grad():
        found = function(*map(copy, arguments), **{name: copy(x) for name, x in options.items()})
        out: Tensor = found if isinstance(found, Tensor) else found.out
        gradients = torch.autograd.grad(out, leaves, out.detach()) if leaves else ()
    return [out.detach(), *gradients]


def judge_peers(rows: Rows, in_tokens: Callable[[Any], Tensor]) -> Callable[[str, Any], str | None]:
    """A function for ``admit`` that says what is wrong with a peer's result."""

    def judge(name: str, result: Any) -> str | None:
        error = rows.error(in_tokens(result))
        return None if error <= PEER_ERROR else f"wrong: {error:.2g} off float64"

    return judge
