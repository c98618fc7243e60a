"""Kernels that are launched before the previous one ends (programmatic dependent launch)."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.language.target_info import cuda_capability_geq


@triton.jit
def wait_for_previous():
    """Let the next kernel be launched, and wait until the previous one has ended.

    Every program of a kernel with ``launch_pdl`` executes this (``launch.begins_early``) before it
    reads or writes what another kernel may. Where it is not launched so, nothing happens.
    """
    if cuda_capability_geq(9, 0):
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def publish():
    """Make a program's stores visible to every kernel that is launched after it ended.

    Those that are launched early may read them before they wait. Every program of a kernel that
    does not let the next one be launched early executes this behind its last store.
    """
    tl.inline_asm_elementwise(
        "fence.acq_rel.gpu; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def let_next_begin():
    """The first half of ``wait_for_previous``."""
    if cuda_capability_geq(9, 0):
        gdc_launch_dependents()


@triton.jit
def wait_now():
    """The second half of ``wait_for_previous``; once it has waited, it returns at once."""
    if cuda_capability_geq(9, 0):
        gdc_wait()
