"""Samples tokens from logits on the device: penalties, cuts, one draw, log-probabilities.

Parameters of a running sequence lie on the device in its row, an index into a ``Sampler``'s
tensors. On a GPU a few kernels read them, whatever parameters the rows have; on a CPU the steps
below are torch code::

    file                 what                                    on a GPU
    sampling_rows.py     parameters as numbers                   the same
    sampling_tables.py   counts, biases, allowed tokens          the same
    step_masks.py        tokens that one step rules out          the same
    torch_shape.py       biases, penalties, bans                 triton_rows.py
                         top_k, top_p, min_p                     triton_cut.py
    torch_draw.py        noise and draw                          triton_score.py, triton_draw.py
    logprobs.py          log-probabilities                       triton_logprobs.py
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..transfer import send_all, send_integers
from . import torch_draw
from .checks import explain_no_token
from .logprobs import add_logprobs, read_logprobs
from .sampling_params import SamplingParams
from .sampling_rows import (
    NUM_FLOATS,
    NUM_INTS,
    Feature,
    SamplingInput,
    encode_row,
    find_features,
)
from .sampling_tables import HAS_TABLES, NUM_TABLES, TokenTables, make_tables
from .step import SampledTokens, StepResults
from .step_masks import StepMasks


class Sampler:
    """Samples rows, each with its own parameters.

    The steps, in this order, each on the result of the one before:

    1. ``logit_bias`` is added. ``repetition_penalty`` r: the logit x of a token in prompt or
       output becomes x / r if positive and x * r if not. ``presence_penalty`` and
       ``frequency_penalty``: a token that occurs c > 0 times in the output loses
       ``presence + c * frequency``. A forbidden token's logit becomes -inf. Rounded to float32.
    2. Greedy rows take the largest logit, the lowest id among equals, and are done.
    3. ``temperature`` T: a token's likelihood is ``exp((x - x_max) / T)``.
    4. ``top_k``: the k best tokens stay. ``top_p``: the fewest best tokens stay whose share of
       the likelihood is at least ``top_p``. Tokens tied with the last of them stay as well.
    5. ``min_p``: tokens at least ``min_p`` times as likely as the best stay.
    6. The draw is Gumbel-max: the token with the largest ``logit / T - log(E)`` has the
       distribution of the softmax. E is exponential noise, of the seed, the index, the number of
       output tokens and the token alone.

    Attributes:
        last_tokens: int64 ``[num_rows]``: the token that each row drew last.
        lengths: int32 ``[num_rows]``: tokens that each row has; less its prompt's length it is
            the position of the next draw, which adds one.
        ints: int32 ``[num_rows, NUM_INTS]``: see ``sampling_rows``.
        floats: float64 ``[num_rows, NUM_FLOATS]``: likewise. The inverse of the temperature is
            negative for greedy rows.
        addresses: int64 ``[num_rows, NUM_TABLES]``: of the rows' tables, see ``sampling_tables``.
        features: int32 ``[num_rows]``, on the host: the ``Feature``s that each row uses.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size, self.device = vocab_size, device
        self.last_tokens = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.lengths = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self.ints = torch.zeros(num_rows, NUM_INTS, dtype=torch.int32, device=device)
        self.floats = torch.zeros(num_rows, NUM_FLOATS, dtype=torch.float64, device=device)
        self.addresses = torch.zeros(num_rows, NUM_TABLES, dtype=torch.int64, device=device)
        self._tables: dict[int, TokenTables] = {}
        self.features = np.zeros(num_rows, np.int32)
        self._params: dict[int, SamplingParams] = {}
        self._masks = StepMasks(vocab_size, device)
        self._kernels: Any = None
        if device.type == "cuda":
            from . import triton_draw

            self._kernels = triton_draw

    def start(self, rows: Sequence[int], inputs: Sequence[SamplingInput]) -> None:
        """Load the parameters of rows whose sequences start or resume."""
        ints = np.zeros((len(rows), NUM_INTS), np.int64)
        floats = np.zeros((len(rows), NUM_FLOATS), np.float64)
        addresses = np.zeros((len(rows), NUM_TABLES), np.int64)
        for at, (row, input_) in enumerate(zip(rows, inputs, strict=True)):
            features = find_features(input_.params, input_.bad_words)
            self.features[row], self._params[row] = features, input_.params
            ints[at], floats[at] = encode_row(input_, features, self.vocab_size)
            if features & Feature.WORDS:
                self._masks.start(row, input_)
            self._tables[row] = TokenTables()
            if features & HAS_TABLES:
                self._tables[row] = make_tables(input_, features, self.vocab_size, self.device)
                addresses[at] = self._tables[row].addresses
        numbers = ints.astype(np.uint32).view(np.int32), floats, addresses
        where, *new = send_all([np.array(rows, np.int64), *numbers], self.device)
        for own, sent in zip((self.ints, self.floats, self.addresses), new, strict=True):
            own[where] = sent

    def uses(self, host_rows: Sequence[int], features: Feature) -> bool:
        """Return whether any of the rows uses any of the features."""
        return bool(np.any(self.features[host_rows] & features))

    def sample(
        self,
        logits: Tensor,
        rows: Tensor,
        host_rows: Sequence[int],
        masks: Any = None,
        drafts: Sequence[Sequence[int]] | None = None,
    ) -> StepResults:
        """Choose the next token of every row, and queue copies of the results to the host.

        Args:
            logits: ``[n, vocab_size]``, float16, bfloat16 or float32. Not written to.
            rows: int64 ``[n]``, on the device.
            host_rows: The same numbers.
            masks: Of rows with a grammar: pairs of a position in ``rows`` and its int32 mask.
            drafts: For each entry of ``rows`` the tokens that are assumed to follow its last one.
                Then a row may come several times, and none advances: that is ``accept``'s.
        """
        features = self.features[list(host_rows)]
        with_words, step_masks = np.flatnonzero(features & Feature.WORDS).tolist(), None
        if masks or with_words:
            step_masks = self._masks.find(host_rows, with_words, masks, drafts)
        state = self
        logprobs: Tensor | None = None
        tables = [self._tables[row] for row in host_rows]
        if drafts is not None:
            # Keeps copies of counted rows alive until the draw is launched.
            tables = [table.after(draft) for table, draft in zip(tables, drafts, strict=True)]
            state = self._copy_rows(rows, drafts, tables)
            rows = torch.arange(len(host_rows), device=self.device)
        if self._kernels is not None:
            packed = self._kernels.draw(logits, rows.int(), state, step_masks)
            tokens, best, logprobs = self._kernels.unpack(packed, len(host_rows))
        else:
            tokens, best = torch_draw.draw(logits, rows, state, features, tables, step_masks)
        if drafts is None:
            if with_words:
                self._masks.advance(tokens, host_rows, with_words)
            if self._kernels is None and np.any(features & Feature.PENALTY):
                for table, token_id in zip(tables, tokens.tolist(), strict=True):
                    table.add([token_id])
        # Rows that the kernels can serve get the kernels' results, whatever other rows use.
        asked = Feature.LOGPROBS if logprobs is None else Feature.MANY_LOGPROBS
        if at := np.flatnonzero(features & asked).tolist():
            num_top = max(self._params[host_rows[i]].logprobs or 0 for i in at)
            logprobs = add_logprobs(logprobs, logits, tokens, at, num_top)
        if logprobs is not None:
            logprobs = _to_host(logprobs) if np.any(features & Feature.LOGPROBS) else None
        return StepResults(_to_host(tokens).numpy(), _to_host(best).numpy(), logprobs)

    @torch.inference_mode()
    def accept(self, host_rows: Sequence[int], token_ids: Sequence[int]) -> None:
        """Record accepted tokens of a step with drafts, in order; rows may come several times."""
        accepted: dict[int, list[int]] = {}
        for row, token_id in zip(host_rows, token_ids, strict=True):
            accepted.setdefault(row, []).append(token_id)
        for row, ids in accepted.items():
            self._tables[row].add(ids)
        with_words = np.flatnonzero(self.features[list(host_rows)] & Feature.WORDS).tolist()
        self._masks.advance(send_integers(token_ids, self.device), host_rows, with_words)

    def collect(self, results: StepResults, host_rows: Sequence[int]) -> SampledTokens:
        """Return the tokens of rows from a step that is computed, without padding behind them."""
        n = len(host_rows)
        tokens = SampledTokens(results.tokens[:n].tolist(), {}, {})
        if results.logprobs is not None:
            wanted = [self._params[row].logprobs for row in host_rows]
            asked = [None if k is None else min(k, self.vocab_size) for k in wanted]
            reports = enumerate(read_logprobs(results.logprobs[:n], tokens.token_ids, asked))
            tokens.logprobs.update((i, report) for i, report in reports if report is not None)
        if not np.isfinite(best := results.best[:n]).all():
            for i in np.flatnonzero(~np.isfinite(best)).tolist():
                tokens.errors[i] = explain_no_token(self._params[host_rows[i]], float(best[i]))
        return tokens

    def _copy_rows(
        self, rows: Tensor, drafts: Sequence[Sequence[int]], tables: Sequence[TokenTables]
    ) -> Sampler:
        """Return copies of rows as they will be after the drafted tokens of each entry."""
        state = copy.copy(self)
        state.last_tokens, state.ints, state.floats = (
            part[rows] for part in (self.last_tokens, self.ints, self.floats)
        )
        state.lengths = self.lengths[rows] + send_integers([*map(len, drafts)], self.device).int()
        state.addresses = send_integers([each.addresses for each in tables], self.device)
        return state


def _to_host(tensor: Tensor) -> Tensor:
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
