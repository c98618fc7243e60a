"""Merge states on a CPU: one pass over the states of each row.

::

    for each (token, head):   m = max lse,   out = Σ exp(lse - m) out / Σ exp(lse - m)
"""

from __future__ import annotations

import numpy as np
import torch

from ...tiles.cpu.arrays import flat, refuse
from ...tiles.cpu.compile import entry
from ...tiles.cpu.simd import fma, load, splat, store, zeros
from ...tiles.state import AttentionOutput


def supports(problem, device):
    """Why this cannot run, or None if it can."""
    if problem.needs_gradient:
        return "a gradient is wanted; the reference has one"
    return refuse(device, outs=problem.dtype)


@entry()
def _merge(out, lse, outs, lses, state_stride, width):
    num_states, num_rows = lses.shape
    whole = width // 16 * 16
    weights = np.empty(num_states, np.float32)
    for row in range(num_rows):
        m = lses[:, row].max() if num_states else -np.inf
        total = np.float32(0)
        for state in range(num_states):
            weights[state] = np.exp(lses[state, row] - m) if m != -np.inf else 0
            total += weights[state]
        lse[row] = m + np.log(total) if total != 0 else -np.inf
        if total != 0:
            weights /= total
        at = row * width
        for d in range(0, whole, 16):
            acc = zeros()
            for state in range(num_states):
                # The output of a state without keys may hold anything, NaN included.
                if weights[state] != 0:
                    part = load(outs, state * state_stride + at + d)
                    acc = fma(splat(weights[state]), part, acc)
            store(out, at + d, acc)


def run(outs, lses):
    """Pad rows to whole vectors, merge, and drop the padding."""
    num_states, *shape = outs.shape
    width = -(-shape[-1] // 16) * 16
    padded = torch.nn.functional.pad(outs, (0, width - shape[-1])).contiguous()
    out = outs.new_empty(*shape[:-1], width)
    lse = lses.new_empty(shape[:-1])
    rows = lse.numel()
    _merge(
        flat(out), lse.view(-1).numpy(), flat(padded),
        lses.detach().reshape(num_states, rows).numpy(), rows * width, width,
    )  # fmt: skip
    return AttentionOutput(out[..., : shape[-1]], lse)
