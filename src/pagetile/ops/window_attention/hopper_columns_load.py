"""What one warp fetches for the others of ``hopper_columns``."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .hopper_tiles import MARKS, MIXED, PIECE
from .hopper_windows import count_turns, end_kind, name_window, no_turns

__all__ = ["load_role"]


@gluon.jit
def _load_round(
    k_desc, v_desc, row_marks_desc, q_desc, dout_desc, marks_desc, pivot_desc, delta_desc, memory,
    windows, wanted, turns, num_masks, head, first_row, MARKED: gl.constexpr, ENDS: gl.constexpr,
    form,
):  # fmt: skip
    """Fetch a window for every stream that wants one; how many turns each has had by then."""
    PIECES: gl.constexpr = form.GROUPS + (form.REST > 0)
    BYTES: gl.constexpr = 2 * (2 * form.WIDTH + (MARKS if MARKED else 0))
    for s in gl.static_range(form.STREAMS):
        if wanted[s]:
            k_slot = memory.k_turns.slot(s, turns[s])
            memory.k_turns.wait_empty(s, turns[s])
            name_window(memory.windows, k_slot, windows[s])
            k_ready = memory.k_turns.expect(s, turns[s], form.ROWS * BYTES)
            keys = [windows[s], head, first_row, 0]
            tma.async_copy_global_to_shared(k_desc, keys, k_ready, memory.k.index(k_slot))
            tma.async_copy_global_to_shared(v_desc, keys, k_ready, memory.v.index(k_slot))
            if MARKED:
                rows = [windows[s] % num_masks, first_row, MARKS]
                row_marks = memory.row_marks.index(k_slot)
                tma.async_copy_global_to_shared(row_marks_desc, rows, k_ready, row_marks)
    for g in range(PIECES):
        for s in gl.static_range(form.STREAMS):
            if wanted[s]:
                use = (turns[s] - ENDS) * PIECES + g
                slot = memory.turns.slot(s, use)
                memory.turns.wait_empty(s, use)
                ready = memory.turns.expect(s, use, PIECE * (BYTES + 8))
                queries = [windows[s], head, g * PIECE, 0]
                tma.async_copy_global_to_shared(q_desc, queries, ready, memory.q.index(slot))
                tma.async_copy_global_to_shared(dout_desc, queries, ready, memory.dout.index(slot))
                numbers = [windows[s] * form.NUM_HEADS + head, g * PIECE]
                pivot, delta = memory.pivot.index(slot), memory.delta.index(slot)
                tma.async_copy_global_to_shared(pivot_desc, numbers, ready, pivot)
                tma.async_copy_global_to_shared(delta_desc, numbers, ready, delta)
                if MARKED:
                    columns = [windows[s] % num_masks, g * PIECE, 0]
                    marks = memory.marks.index(slot)
                    tma.async_copy_global_to_shared(marks_desc, columns, ready, marks)
    return count_turns(turns, wanted)


@gluon.jit
def load_role(
    k_desc, v_desc, row_marks_desc, q_desc, dout_desc, marks_desc, pivot_desc, delta_desc, memory,
    windows, head, first_row, form,
):  # fmt: skip
    """One warp: fetch keys and values, and what was asked and came back, kind by kind."""
    turns = no_turns(head, form)
    for i in gl.static_range(form.KINDS):
        base = -32
        bits = 0
        some = windows.count > 0
        while some:
            these = ()
            wanted = ()
            for _ in gl.static_range(form.STREAMS):
                base, bits, window, some = windows.next(base, bits, i, form.MASK)
                these = these + (window,)  # type: ignore[assignment] # noqa: RUF005
                wanted = wanted + (some,)  # type: ignore[assignment] # noqa: RUF005
            turns = _load_round(
                k_desc, v_desc, row_marks_desc, q_desc, dout_desc, marks_desc, pivot_desc,
                delta_desc, memory, these, wanted, turns, windows.num_masks, head, first_row,
                i == MIXED, i, form,
            )  # fmt: skip
        turns = end_kind(memory.k_turns, memory.windows, turns)
    gdc_wait()  # see ``hopper_launch``
    gdc_launch_dependents()
