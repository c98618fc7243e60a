"""From logits to tokens: penalties, cuts, one draw, and log-probabilities, on the device.

The draw is Gumbel-max: the token with the largest ``logit / temperature - log(E)``, where E is
exponential noise. No softmax over the vocabulary is needed, and tokens come out by their
probabilities.

Parameters of a running sequence lie on the device in its row; rows are numbers of a ``Sampler``'s
tensors. On a GPU the steps below are a few kernels that read them, whatever the rows ask for; on a
CPU they are torch code::

    file                 what                                    on a GPU
    sampling_rows.py     parameters as numbers                   the same
    sampling_tables.py   counts, biases, allowed tokens          the same
    torch_shape.py       biases, penalties, bans                 triton_rows.py
                         top_k, top_p, min_p                     triton_cut.py
    torch_draw.py        noise and draw                          triton_score.py, triton_draw.py
    logprobs.py          log-probabilities                       triton_logprobs.py
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..errors import GenerationError, NoTokenLeftError, ShapeError
from ..shapes import bind, check_dtype
from ..transfer import pack, send, unpack
from .logprobs import TokenLogprobs, compute_logprobs, read_logprobs
from .sampling_params import SamplingParams
from .sampling_rows import (
    BY_TORCH,
    MAX_TOP,
    NUM_FLOATS,
    NUM_INTS,
    Feature,
    SamplingInput,
    encode_row,
    find_features,
)
from .sampling_tables import RowTables, TokenTables
from .torch_draw import draw_tokens
from .torch_shape import shape_logits

__all__ = ["SampledToken", "SampledTokens", "Sampler", "SamplingInput", "sample"]

_SHAPED = Feature.CUT | Feature.PENALTY | Feature.BIAS | Feature.BAN


class SampledToken(NamedTuple):
    """The next token of one row.

    Log-probabilities are those of the model: of the logits as they came, before penalties,
    temperature and cuts.
    """

    token_id: int
    logprobs: TokenLogprobs | None = None  # if params.logprobs is not None
    error: str | None = None  # why the row has no token; token_id is 0 then
    error_type: type[GenerationError] = GenerationError  # of that error, raised or not


class SampledTokens(NamedTuple):
    """The next tokens of a step's rows."""

    token_ids: list[int]
    others: dict[int, SampledToken]
    """Of the rows that have more than an id: log-probabilities, or an error."""

    def listed(self) -> list[SampledToken]:
        """One ``SampledToken`` a row."""
        return [self.others.get(at) or SampledToken(i) for at, i in enumerate(self.token_ids)]


class DrawState(NamedTuple):
    """Rows as a draw reads and advances them: ``Sampler``'s attributes of the same names."""

    last_tokens: Tensor
    lengths: Tensor
    ints: Tensor
    floats: Tensor
    addresses: Tensor


class Sampler:
    """Samples rows, each by the parameters that lie on the device.

    The steps, in this order, each on what the one before left:

    1. ``logit_bias`` is added. ``repetition_penalty`` r: the logit x of a token in prompt or
       output becomes x / r if positive and x * r if not. ``presence_penalty`` and
       ``frequency_penalty``: a token that occurs c > 0 times in the output loses
       ``presence + c * frequency``. A forbidden token's logit becomes -inf. Rounded to float32.
    2. Greedy rows take the largest logit, the lowest id among equals, and are done.
    3. ``temperature`` T: a token's likelihood is ``exp((x - x_max) / T)``.
    4. ``top_k``: the k best tokens stay. ``top_p``: the fewest best tokens stay whose share of
       the likelihood is at least ``top_p``. Tokens tied with the last of them stay as well.
    5. ``min_p``: tokens at least ``min_p`` times as likely as the best stay.
    6. The draw, by noise of (seed, index, number of output tokens) and of nothing else.

    Args:
        num_rows: Rows there are.
        vocab_size: Width of the logits.
        device: Where they are.

    Attributes:
        last_tokens: int64 ``[num_rows]``: the token that each row drew last.
        lengths: int32 ``[num_rows]``: tokens that each row has; less its prompt's length it is
            the position of the next draw, which adds one.
        ints: int32 ``[num_rows, NUM_INTS]``: see ``sampling_rows``.
        floats: float64 ``[num_rows, NUM_FLOATS]``: likewise. The inverse of the temperature is
            negative for greedy rows.
        addresses: int64 ``[num_rows, NUM_TABLES]``: of the rows' tables, see ``sampling_tables``.
        features: int32 ``[num_rows]``, on the host: what each row asks for.
        compiles_masks: Set it to have the next ``sample`` compile the kernels for grammars, too.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size, self.device = vocab_size, device
        self.last_tokens = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.lengths = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self.ints = torch.zeros(num_rows, NUM_INTS, dtype=torch.int32, device=device)
        self.floats = torch.zeros(num_rows, NUM_FLOATS, dtype=torch.float64, device=device)
        self._tables = RowTables(num_rows, vocab_size, device)
        self.addresses = self._tables.addresses
        self.features = np.zeros(num_rows, np.int32)
        self._inputs: dict[int, SamplingInput] = {}
        self._tails: dict[int, Tensor] = {}
        self.compiles_masks = False
        self._kernels: Any = None
        if device.type == "cuda":
            from . import triton_draw

            self._kernels = triton_draw

    def start(self, rows: Sequence[int], inputs: Sequence[SamplingInput]) -> None:
        """Load the parameters of rows whose sequences begin or come back."""
        features = [find_features(input_.params, input_.bad_words) for input_ in inputs]
        ints = np.zeros((len(rows), NUM_INTS), np.int64)
        floats = np.zeros((len(rows), NUM_FLOATS), np.float64)
        for at, (row, input_) in enumerate(zip(rows, inputs, strict=True)):
            self.features[row] = features[at]
            self._inputs[row] = input_
            ints[at], floats[at] = encode_row(input_, features[at], self.vocab_size)
            if features[at] & Feature.WORDS:
                longest = max(len(ids) - 1 for ids in input_.bad_words)
                tail = [-1] * longest + list(input_.output_token_ids[-longest:])
                self._tails[row] = self._send(tail[-longest:])
        arrays: list[npt.NDArray[Any]] = [
            np.array(rows, np.int64),
            ints.astype(np.uint32).view(np.int32),
            floats,
            self._tables.load(rows, inputs, features),
        ]
        packed = pack(arrays, self.device).to(self.device, non_blocking=True)
        where, *new = unpack(packed, arrays)
        for numbers, own in zip((self.ints, self.floats, self.addresses), new, strict=True):
            numbers[where] = own

    def needs_torch(self, host_rows: Sequence[int]) -> bool:
        """Whether any of the rows asks for what kernels do not compute."""
        return bool(np.any(self.features[host_rows] & BY_TORCH))

    def has_logprobs(self, host_rows: Sequence[int]) -> bool:
        """Whether any of the rows asks for log-probabilities."""
        return bool(np.any(self.features[host_rows] & Feature.LOGPROBS))

    def sample(
        self,
        logits: Tensor,
        rows: Tensor,
        host_rows: Sequence[int],
        masks: Any = None,
        drafts: Sequence[Sequence[int]] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Choose the next token of every row.

        Args:
            logits: ``[n, vocab_size]``, float16, bfloat16 or float32. Not written to.
            rows: int64 ``[n]``, on the device.
            host_rows: The same numbers.
            masks: Of rows with a grammar: pairs of a position in ``rows`` and its int32 mask.
            drafts: For each entry of ``rows`` the tokens that are assumed to follow its last one.
                Then a row may come several times, and none advances: that is ``accept``'s.

        Returns:
            Token ids int64 ``[n]``; the largest logits, float32 ``[n]``, finite where there is a
            token; and, if any row asks for log-probabilities, what ``read_logprobs`` reads, a
            line for every row, undefined for rows that ask for none.
        """
        host_rows = list(host_rows)
        features = self.features[host_rows]
        step_masks = self._find_step_masks(host_rows, masks, drafts)
        # Copies of counted rows live here until the draw is launched.
        tables = None if drafts is None else self._tables.of(host_rows, drafts)
        state: Sampler | DrawState = self
        if drafts is not None and tables is not None:
            state = self._copy_rows(rows, drafts, tables)
            rows = torch.arange(len(host_rows), device=self.device)
        logprobs = None
        if self._kernels is not None:
            if self.compiles_masks:
                self.compile_masks(logits)
            packed = self._kernels.draw(logits, rows.int(), state, step_masks)
            tokens, best, logprobs = self._kernels.unpack(packed, len(host_rows))
        else:
            tables = self._tables.of(host_rows) if tables is None else tables
            x = logits.float()
            tokens, best = self._draw_by_torch(x, rows, features, state, tables, step_masks)
        if drafts is None:
            self._move_tails(tokens, host_rows)
            if self._kernels is None and np.any(features & Feature.PENALTY):
                self._tables.add(host_rows, tokens.tolist())
        if not np.any(features & Feature.LOGPROBS):
            return tokens, best, None
        # What a row gets from a kernel does not change because of others beside it.
        asked = Feature.LOGPROBS if logprobs is None else Feature.MANY_LOGPROBS
        at = np.flatnonzero(features & asked).tolist()
        if at:
            logprobs = self._add_logprobs(logprobs, logits, tokens, host_rows, at)
        return tokens, best, logprobs

    def accept(self, host_rows: Sequence[int], token_ids: Sequence[int]) -> None:
        """Take note of tokens that ``sample`` chose with drafts, in order; rows may come again."""
        self._tables.add(host_rows, token_ids)
        self._move_tails(self._send(token_ids), host_rows)

    def collect(
        self,
        tokens: npt.NDArray[Any],
        best: npt.NDArray[Any],
        logprobs: Tensor | None,
        host_rows: Sequence[int],
    ) -> SampledTokens:
        """What ``sample`` returned, brought to the host, for each row."""
        ids, others = tokens.tolist(), {}
        if logprobs is not None:
            most = min(self.vocab_size, logprobs.shape[1] // 2 - 1)
            asked = [
                None if n is None else min(n, most)
                for n in (self._inputs[row].params.logprobs for row in host_rows)
            ]
            reports = read_logprobs(logprobs, ids, asked)
            others = {i: SampledToken(r.token_id, r) for i, r in enumerate(reports) if r}
        if not np.isfinite(best).all():
            for i, top in enumerate(best.tolist()):
                if not math.isfinite(top):
                    params = self._inputs[host_rows[i]].params
                    message, error_type = _why_no_token(params, top)
                    others[i] = SampledToken(0, error=message, error_type=error_type)
        return SampledTokens(ids, others)

    def _copy_rows(
        self, rows: Tensor, drafts: Sequence[Sequence[int]], tables: Sequence[TokenTables]
    ) -> DrawState:
        """Rows as they will be after the drafted tokens of each entry."""
        shifts = send(np.array([*map(len, drafts)], np.int32), self.device)
        return DrawState(
            self.last_tokens[rows],
            self.lengths[rows] + shifts,
            self.ints[rows],
            self.floats[rows],
            self._send([each.addresses() for each in tables]),
        )

    def compile_masks(self, logits: Tensor) -> None:
        """Compile what requests with a grammar would wait for, in a draw of no row."""
        self.compiles_masks = False
        for n in {1, len(logits)}:
            rows = torch.full((n,), -1, dtype=torch.int32, device=self.device)
            masks = torch.zeros(n, -(-self.vocab_size // 32), dtype=torch.int32, device=self.device)
            self._kernels.draw(logits[:n], rows, self, masks)

    def _draw_by_torch(
        self,
        x: Tensor,
        rows: Tensor,
        features: Any,
        state: Sampler | DrawState,
        tables: Sequence[TokenTables],
        step_masks: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        lengths, ints, floats = state.lengths[rows], state.ints[rows], state.floats[rows]
        if step_masks is not None or np.any(features & _SHAPED):
            x = shape_logits(x, features, tables, lengths, ints, floats, step_masks)
        tokens, best = draw_tokens(x, features, lengths, ints, floats)
        state.last_tokens[rows] = tokens
        state.lengths[rows] += 1
        return tokens, best

    def _add_logprobs(
        self,
        known: Tensor | None,
        logits: Tensor,
        tokens: Tensor,
        host_rows: Sequence[int],
        at: Sequence[int],
    ) -> Tensor:
        """Log-probabilities of some rows by torch beside those that kernels computed of others."""
        num_top = max(self._inputs[host_rows[i]].params.logprobs or 0 for i in at)
        num_top = min(num_top, self.vocab_size)
        if len(at) == len(host_rows):
            return compute_logprobs(logits, tokens, num_top)
        where = self._send(at)
        found = compute_logprobs(logits[where], tokens[where], num_top)
        wide = found.new_zeros(len(host_rows), found.shape[1])
        if known is not None:
            most, end = min(MAX_TOP, num_top) + 1, MAX_TOP + 1
            wide[:, :most] = known[:, :most]
            wide[:, num_top + 1 : num_top + 1 + most] = known[:, end : end + most]
        return wide.index_copy_(0, where, found)

    # --- tokens that are ruled out in one step only ---------------------------------------------

    def _find_step_masks(
        self, host_rows: list[int], masks: Any, drafts: Sequence[Sequence[int]] | None
    ) -> Tensor | None:
        """Bits of the tokens that grammars and bad words allow now, or ``None`` for all.

        Returns:
            int32 ``[n, ceil(vocab_size / 32)]``.
        """
        with_words = np.flatnonzero(self.features[host_rows] & Feature.WORDS).tolist()
        if not masks and not with_words:
            return None
        shape = len(host_rows), -(-self.vocab_size // 32)
        allowed = torch.full(shape, -1, dtype=torch.int32, device=self.device)
        if masks:
            where = self._send([i for i, _ in masks])
            words = send(np.stack([mask for _, mask in masks]), self.device)
            allowed.index_copy_(0, where, words)
        for i in with_words:
            self._rule_out_words(allowed[i], host_rows[i], () if drafts is None else drafts[i])
        return allowed

    def _rule_out_words(self, allowed: Tensor, row: int, draft: Sequence[int]) -> None:
        """Clear the bits of tokens that would complete a bad word."""
        tail = self._tails[row]
        if draft:
            tail = torch.cat([tail, self._send(draft)])
        for *before, last in self._inputs[row].bad_words:
            if before and 0 <= last < self.vocab_size:
                is_next = (tail[-len(before) :] == self._send(before)).all()
                word = allowed[last >> 5 : (last >> 5) + 1]
                bit = np.array([1 << (last & 31)], np.uint32).view(np.int32)
                word &= torch.where(is_next, int(~bit[0]), -1).int()

    def _move_tails(self, tokens: Tensor, host_rows: Sequence[int]) -> None:
        for i in np.flatnonzero(self.features[list(host_rows)] & Feature.WORDS).tolist():
            tail = self._tails[host_rows[i]]
            self._tails[host_rows[i]] = torch.cat([tail[1:], tokens[i : i + 1]])

    def _send(self, numbers: Any) -> Tensor:
        return send(np.array(numbers, np.int64), self.device)


def sample(logits: Tensor, rows: Sequence[SamplingInput]) -> list[SampledToken]:
    """Choose the next token of every row: ``Sampler`` for rows that are on the host.

    Args:
        logits: ``[num_rows, vocab_size]``, float16, bfloat16, float32 or float64 (rounded to
            float32), any device. Not written to.
        rows: One per row of ``logits``.

    Returns:
        One ``SampledToken`` per row. A row whose logits hold NaN or +inf, or that forbids every
        token, has ``error`` set; the others are not affected.

    Raises:
        ShapeError: ``logits`` is not a matrix with one row per entry of ``rows``.
        DTypeError: ``logits`` is not floating point of 16, 32 or 64 bits.

    Example:
        >>> logits = torch.tensor([[0.0, 2.0, 1.0], [0.0, 2.0, 1.0]])
        >>> greedy = SamplingInput(SamplingParams(temperature=0.0), [], [], seed=0, index=0)
        >>> drawn = SamplingInput(SamplingParams(logprobs=0), [], [], seed=0, index=0)
        >>> first, second = sample(logits, [greedy, drawn])
        >>> first.token_id, second.token_id, round(second.logprobs.logprob, 4)
        (1, 1, -0.4076)
    """
    num_rows = bind(logits=(logits, "num_rows vocab_size"))["num_rows"]
    if len(rows) != num_rows:
        raise ShapeError(f"logits has num_rows={num_rows} but rows has {len(rows)}: one per row")
    check_dtype("logits", logits, torch.float16, torch.bfloat16, torch.float32, torch.float64)
    if not rows:
        return []
    logits = logits.detach()
    logits = logits.float() if logits.dtype == torch.float64 else logits
    sampler = Sampler(num_rows, logits.shape[1], logits.device)
    numbers = range(num_rows)
    sampler.start(numbers, rows)
    lengths = [len(row.prompt_token_ids) + len(row.output_token_ids) for row in rows]
    sampler.lengths.copy_(send(np.array(lengths, np.int32), logits.device))
    where = torch.arange(num_rows, device=logits.device)
    tokens, best, logprobs = sampler.sample(logits, where, numbers)
    found = sampler.collect(tokens.cpu().numpy(), best.cpu().numpy(), logprobs, numbers)
    return found.listed()


def _why_no_token(params: SamplingParams, best: float) -> tuple[str, type[GenerationError]]:
    """The error of a row whose largest logit ``best`` is not finite, and the error's type.

    It is ``NoTokenLeftError`` where the request's own parameters are to blame.
    """
    restricts = params.structured_outputs or params.allowed_token_ids or params.bad_words
    if best == -math.inf and restricts:
        message = (
            "the request's parameters leave no token: structured_outputs, allowed_token_ids, "
            "bad_words and min_tokens together forbid every token"
        )
        return message, NoTokenLeftError
    if best == math.inf and params.repetition_penalty != 1.0:
        message = (
            f"the request's parameters leave no token: "
            f"repetition_penalty={params.repetition_penalty} makes logits infinite"
        )
        return message, NoTokenLeftError
    message = (
        f"the largest logit is {best}, expected a finite one: -inf means that every token is "
        "forbidden; otherwise check the weights and the dtype (float16 overflows at 65504)"
    )
    return message, GenerationError
