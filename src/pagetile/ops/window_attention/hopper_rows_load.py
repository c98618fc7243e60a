"""What one warp fetches for the others of ``hopper_rows``."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .hopper_tiles import MARKS, MIXED, PIECE
from .hopper_windows import end_kind, name_window

ROWS = PIECE

__all__ = ["load_role"]


@gluon.jit
def load_role(
    q_desc, dout_desc, row_marks_desc, pivot_desc, delta_desc, k_desc, v_desc, marks_desc, memory,
    windows, head, first_row, first_key, form,
):  # fmt: skip
    """One warp: fetch what was asked and came back, and every share's keys and values."""
    turn = 0
    first_key = first_key if form.PARTIAL else 0
    if not form.PARTIAL:  # see ``hopper_launch``
        gdc_wait()
        gdc_launch_dependents()
    for i in gl.static_range(form.KINDS):
        base = -32
        bits = 0
        base, bits, window, is_there = windows.next(base, bits, i, form.MASK)
        while is_there:
            _load_window(
                q_desc, dout_desc, row_marks_desc, pivot_desc, delta_desc, k_desc, v_desc,
                marks_desc, memory, window, turn, windows.num_masks, head, first_row, first_key,
                i == MIXED, i, form,
            )  # fmt: skip
            turn += 1
            base, bits, window, is_there = windows.next(base, bits, i, form.MASK)
        (turn,) = end_kind(memory.q_turns, memory.windows, (turn,))


@gluon.jit
def _load_window(
    q_desc, dout_desc, row_marks_desc, pivot_desc, delta_desc, k_desc, v_desc, marks_desc, memory,
    window, turn, num_masks, head, first_row, first_key, MARKED: gl.constexpr, ENDS: gl.constexpr,
    form,
):  # fmt: skip
    """A window's turn, of which ``ENDS`` before were none."""
    BYTES: gl.constexpr = 2 * (2 * form.WIDTH + (MARKS if MARKED else 0))
    BOXES: gl.constexpr = form.KEYS // form.BOX
    slot = memory.q_turns.slot(0, turn)
    memory.q_turns.wait_empty(0, turn)
    name_window(memory.windows, slot, window)
    ready = memory.q_turns.expect(0, turn, ROWS * (BYTES + 8))
    at = [window, head, first_row, 0]
    tma.async_copy_global_to_shared(q_desc, at, ready, memory.q.index(slot))
    tma.async_copy_global_to_shared(dout_desc, at, ready, memory.dout.index(slot))
    numbers = [window * form.NUM_HEADS + head, first_row]
    tma.async_copy_global_to_shared(pivot_desc, numbers, ready, memory.pivot.index(slot))
    tma.async_copy_global_to_shared(delta_desc, numbers, ready, memory.delta.index(slot))
    place = window % num_masks
    if MARKED:
        rows = [place, first_row, MARKS]
        row_marks = memory.row_marks.index(slot)
        tma.async_copy_global_to_shared(row_marks_desc, rows, ready, row_marks)
    use = turn - ENDS
    for s in gl.static_range(form.STREAMS):
        k_slot = memory.turns.slot(s, use)
        memory.turns.wait_empty(s, use)
        k_ready = memory.turns.expect(s, use, form.KEYS * BYTES)
        for b in gl.static_range(BOXES):
            first = first_key + s * form.KEYS + b * form.BOX
            box = k_slot * BOXES + b
            keys = [window, head, first, 0]
            tma.async_copy_global_to_shared(k_desc, keys, k_ready, memory.k.index(box))
            tma.async_copy_global_to_shared(v_desc, keys, k_ready, memory.v.index(box))
            if MARKED:
                columns = [place, first, 0]
                marks = memory.marks.index(box)
                tma.async_copy_global_to_shared(marks_desc, columns, k_ready, marks)
