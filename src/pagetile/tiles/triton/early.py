"""Programmatic dependent launch: kernels that start before the previous one ends."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.language.target_info import cuda_capability_geq


@triton.jit
def wait_for_previous():
    """Let the next kernel start, and wait until the previous one has ended.

    Every program of a kernel with ``launch_pdl`` must execute this (``launch.begins_early``) before
    it reads or writes what another kernel may. Without ``launch_pdl`` it has no effect.
    """
    if cuda_capability_geq(9, 0):
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def publish():
    """Make a program's stores visible to kernels that start after it has ended.

    A later kernel that starts early may read them before it waits. Every program of a kernel that
    does not let the next one start early executes this after its last store.
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
    """The second half of ``wait_for_previous``; later calls return at once."""
    if cuda_capability_geq(9, 0):
        gdc_wait()
