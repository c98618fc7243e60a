"""Window attention on a CPU, forward and backward: windows in groups that share rows of bias.

::

    for each head and part of the windows (a work item):
        for each group of windows:        transpose keys and values
            for each block of rows:       gather their bias from the table, once per group
                for each window:          scores, bias, softmax, output — or their gradients

Keys, values and a block of scores fit in the L2 cache; nothing larger is allocated. A part sums its
gradient of the table in the order of its windows, and the parts are added in order. Parts depend on
shapes alone, so two runs give the same bits with any number of threads.

Computes in float32; float16 and bfloat16 are converted as they are read and written. With
AVX512-BF16, bfloat16 is multiplied as it is, and weights and score gradients are rounded to it for
products, not for the sum of a row or the gradient of the bias. Cosine attention is converted: its
normalised rows are no bfloat16.

A dense bias or mask is read in place if it is contiguous float32 and copied to that otherwise; each
part has a gradient of the bias of its own. Several biases are left to the reference.

In the kernels, ``x`` holds a call's inputs, ``z`` the sizes of blocks (``sizes_of``), and
``w`` a thread's scratch arrays.
"""

from __future__ import annotations

import math
from collections import namedtuple

import numpy as np
import torch

from ....device import DeviceInfo
from ....tiles.cpu.arrays import flat, refuse
from ....tiles.cpu.threads import run_together
from ....tiles.state import AttentionOutput
from ..problem import LEAST_SCORE, MAX_LOGIT_SCALE, Gradients
from ..reference import saturate
from .backward_kernel import GradientArrays, SavedForward, differentiate
from .forward_kernel import attend
from .rows import NO_NORM

_LOG2_E = 1.4426950408889634
_PARTS, _WORK_ITEMS, _WINDOWS = 32, 32, 16
"""Most parts of the windows, each with its own gradient of a head's table or dense bias; target
number of work items; fewest windows of a part beyond that, since every part gathers its bias."""

_NOTHING, _NO_REGIONS, _BFLOATS = (np.empty(0, t) for t in (np.float32, np.int64, np.uint16))

# The arguments that the forward and the backward kernel share. ``element`` is an empty array of the
# type that products take.
_Inputs = namedtuple(
    "_Inputs",
    "q k v q_strides k_strides v_strides table table_size offsets bias regions mask num_masks "
    "logit_scale softmax_scale mask_value eps num_windows num_heads num_tokens size parts counter"
    " element",
)


def supports(problem, device):
    """Return why this cannot run, or None if it can."""
    if problem.num_biases > 1:
        return f"biases of {problem.num_biases} windows are left to the reference"
    if torch.float64 in problem.learned_dtypes:
        return "a float64 table, bias or logit_scale is left to the reference"
    return refuse(device, q=problem.dtype)


def forward(problem, x):
    """Convert the inputs, split the windows into parts, and run the parts on threads."""
    inputs, num_threads = _kernel_inputs(problem, x)
    out = _empty_rows(problem, x.q, problem.dtype)
    lse = x.q.new_empty(x.q.shape[:3], dtype=torch.float32)
    run_together(attend, num_threads, flat(out), flat(lse), inputs)
    return AttentionOutput(out.transpose(1, 2), lse)


def backward(problem, x, out, lse, dout, dlse):
    """Run the backward kernel likewise, and add the parts' gradients of table and scale."""
    inputs, num_threads = _kernel_inputs(problem, x)
    # float16 gradients are clamped to its range before they are rounded.
    kept = torch.float32 if problem.dtype == torch.float16 else problem.dtype
    dq, dk, dv = (_empty_rows(problem, x.q, kept) for _ in range(3))
    size = inputs.table_size if x.bias is None else problem.num_tokens**2
    table_shape = (inputs.parts, problem.num_heads, size)
    dtable = x.q.new_zeros(table_shape, dtype=torch.float32)
    dscale = dtable.new_zeros(table_shape[:2])
    gradients = GradientArrays(*(flat(t) for t in (dq, dk, dv, dtable, dscale)))
    out, dout = out.transpose(1, 2).contiguous(), _with_rows(dout)
    saved = SavedForward(flat(out), flat(lse), flat(dout), dout.stride()[:3], _float_array(dlse))
    run_together(differentiate, num_threads, gradients, saved, inputs)
    table = bias = scale = None
    if x.bias_table is not None:
        table = dtable.sum(dim=0).T.to(x.bias_table.dtype)
    if x.bias is not None:
        bias = dtable.sum(dim=0).view_as(x.bias).to(x.bias.dtype)
    if x.logit_scale is not None:
        clamped = x.logit_scale > MAX_LOGIT_SCALE
        scale = dscale.sum(dim=0).masked_fill(clamped, 0.0).to(x.logit_scale.dtype)
    dq, dk, dv = (saturate(t.transpose(1, 2), problem.dtype) for t in (dq, dk, dv))
    return Gradients(dq, dk, dv, table, bias, scale)


def _with_rows(x):
    """``x`` itself if its rows are contiguous, or else a copy."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _additive(mask, value):
    """A boolean mask as numbers to add: ``value`` where it is False."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=torch.float32).masked_fill_(~mask, value)


def _limit(value):
    """Limit a mask value to float32's range in base 2, with -inf below it: NumPy would warn."""
    return -math.inf if value < LEAST_SCORE else min(-LEAST_SCORE, value)


def _float_array(parameter):
    """A parameter as a flat float32 array; an empty one for None."""
    return _NOTHING if parameter is None else flat(parameter.detach().float().contiguous())


def _empty_rows(problem, q, dtype):
    shape = problem.num_windows, problem.num_tokens, problem.num_heads, problem.head_size
    return q.new_empty(shape, dtype=dtype)


def _kernel_inputs(problem, x):
    """The inputs of the kernels, and the number of threads for this amount of work."""
    q, k, v = map(_with_rows, (x.q, x.k, x.v))
    mask_value = _limit(x.mask_value)
    offsets = np.arange(problem.num_tokens, dtype=np.int64)
    if x.rel_offsets is not None:
        offsets = x.rel_offsets.to(torch.int64).numpy()
    arrays = [flat(t) for t in (q, k, v)]
    strides = [t.stride()[:3] for t in (q, k, v)]
    added = [
        _float_array(x.bias_table),
        problem.table_size or 0,
        offsets,
        _float_array(x.bias),
        _NO_REGIONS if x.regions is None else flat(x.regions.to(torch.int64).contiguous()),
        _float_array(_additive(x.mask, mask_value)),
        problem.num_masks,
        _float_array(x.logit_scale),
    ]
    numbers = [
        np.float32(x.softmax_scale),
        np.float32(mask_value * _LOG2_E),
        np.float32(x.qk_norm_eps) if problem.cosine else NO_NORM,
    ]
    parts = max(-(-_WORK_ITEMS // max(1, problem.num_heads)), problem.num_windows // _WINDOWS)
    parts = max(1, min(parts, problem.num_windows, _PARTS))
    counter = np.zeros(1, np.int64)
    sizes = problem.num_windows, problem.num_heads, problem.num_tokens, problem.head_size
    device = DeviceInfo.of(x.q.device)
    is_paired = device.bf16_dot and problem.dtype == torch.bfloat16 and not problem.cosine
    element = _BFLOATS if is_paired else _NOTHING
    inputs = _Inputs(*arrays, *strides, *added, *numbers, *sizes, parts, counter, element)  # type: ignore[call-arg]
    work = problem.num_windows * problem.num_heads * problem.num_tokens**2 * problem.head_size
    return inputs, device.num_workers if work > 1 << 18 else 1
