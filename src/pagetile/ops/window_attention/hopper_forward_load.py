"""What one warp fetches for the others of ``hopper_forward``."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.extra.cuda import gdc_wait

from .hopper_tiles import FLAT, MANY, MARKS, MIXED
from .hopper_windows import count_turns, end_kind, name_window, no_turns

__all__ = ["bit", "load_role"]


@gluon.jit
def _load_round(
    q_desc, k_desc, v_desc, row_marks_desc, marks_desc, memory, windows, wanted, turns, num_masks,
    head, first_row, MARKED: gl.constexpr, ENDS: gl.constexpr, form,
):  # fmt: skip
    """Fetch a window for every stream that wants one; how many each has had by then."""
    WIDTH: gl.constexpr = form.WIDTH
    PIECES: gl.constexpr = form.GROUPS + (form.REST > 0)
    NUMBERS: gl.constexpr = WIDTH + (MARKS if MARKED else 0)
    for s in gl.static_range(form.STREAMS):
        if wanted[s]:
            q_slot = memory.q_turns.slot(s, turns[s])
            memory.q_turns.wait_empty(s, turns[s])
            name_window(memory.windows, q_slot, windows[s])
            q_ready = memory.q_turns.expect(s, turns[s], form.ROWS * NUMBERS * 2)
            q = [windows[s], head, first_row, 0]
            tma.async_copy_global_to_shared(q_desc, q, q_ready, memory.q.index(q_slot))
            if MARKED:
                rows = [windows[s] % num_masks, first_row, MARKS]
                row_marks = memory.row_marks.index(q_slot)
                tma.async_copy_global_to_shared(row_marks_desc, rows, q_ready, row_marks)
    for g in range(PIECES):
        for s in gl.static_range(form.STREAMS):
            if wanted[s]:
                use = (turns[s] - ENDS) * PIECES + g
                slot = memory.turns.slot(s, use)
                memory.turns.wait_empty(s, use)
                ready = memory.turns.expect(s, use, form.PIECE * (NUMBERS + WIDTH) * 2)
                keys = [windows[s], head, g * form.PIECE, 0]
                tma.async_copy_global_to_shared(k_desc, keys, ready, memory.k.index(slot))
                tma.async_copy_global_to_shared(v_desc, keys, ready, memory.v.index(slot))
                if MARKED:
                    columns = [windows[s] % num_masks, g * form.PIECE, 0]
                    marks = memory.marks.index(slot)
                    tma.async_copy_global_to_shared(marks_desc, columns, ready, marks)
    return count_turns(turns, wanted)


@gluon.jit
def _load_kind(
    q_desc, k_desc, v_desc, row_marks_desc, marks_desc, memory, windows, head, first_row, told,
    turns, then, KIND: gl.constexpr, ENDS: gl.constexpr, AGAIN: gl.constexpr, form,
):  # fmt: skip
    """Fetch the windows of a kind, the streams' in turn; ``AGAIN``: those that a bit asks for.

    ``then`` counts what each stream had when it met them first; ``ENDS`` of its turns were none.
    """
    base = -32
    bits = 0
    some = windows.count > 0
    while some:
        these = ()
        wanted = ()
        after = ()
        for s in gl.static_range(form.STREAMS):
            base, bits, window, is_there = windows.next(base, bits, KIND, form.MASK)
            is_wanted = is_there
            if AGAIN:
                is_wanted = is_there & (told[s] & bit(then[s]) != 0)
            these = these + (window,)  # type: ignore[assignment] # noqa: RUF005
            wanted = wanted + (is_wanted,)  # type: ignore[assignment] # noqa: RUF005
            after = after + (then[s] + is_there.to(gl.int32),)  # type: ignore[assignment] # noqa: RUF005
            some = is_there
        turns = _load_round(
            q_desc, k_desc, v_desc, row_marks_desc, marks_desc, memory, these, wanted, turns,
            windows.num_masks, head, first_row, KIND == MIXED and not AGAIN, ENDS, form,
        )  # fmt: skip
        then = after
    return turns, then


@gluon.jit
def load_role(
    q_desc, k_desc, v_desc, row_marks_desc, marks_desc, memory, windows, head, first_row, form,
):  # fmt: skip
    """One warp: fetch queries, keys and values of every stream's windows, kind by kind."""
    QUICK_KINDS: gl.constexpr = min(form.KINDS, 2)
    none = no_turns(head, form)
    if form.MASK:
        gdc_wait()  # for the kernel that marks; see ``hopper_launch``
    turns = none
    for i in gl.static_range(QUICK_KINDS):
        turns, then = _load_kind(
            q_desc, k_desc, v_desc, row_marks_desc, marks_desc, memory, windows, head, first_row,
            none, turns, turns, i, i, False, form,
        )  # fmt: skip
        turns = end_kind(memory.q_turns, memory.windows, turns)
    mbarrier.wait(memory.told, 0)
    told = ()
    any_told = 0
    num_left = windows.count
    for s in gl.static_range(form.STREAMS):
        word = _told(memory, s)
        told = told + (word,)  # type: ignore[assignment] # noqa: RUF005
        any_told = any_told | word
        num_left -= turns[s] - QUICK_KINDS
    if any_told != 0:
        then = none
        for i in gl.static_range(QUICK_KINDS):
            turns, then = _load_kind(
                q_desc, k_desc, v_desc, row_marks_desc, marks_desc, memory, windows, head,
                first_row, told, turns, then, i, QUICK_KINDS, True, form,
            )  # fmt: skip
            met = ()
            for s in gl.static_range(form.STREAMS):
                met = met + (then[s] + 1,)  # type: ignore[assignment] # noqa: RUF005
            then = met
    if num_left > 0:
        turns, then = _load_kind(
            q_desc, k_desc, v_desc, row_marks_desc, marks_desc, memory, windows, head, first_row,
            none, turns, turns, MANY, QUICK_KINDS, False, form,
        )  # fmt: skip
    end_kind(memory.q_turns, memory.windows, turns)


@gluon.jit
def bit(turn):
    """A turn's in its stream's word; with more than 32, some share one."""
    return 1 << turn % 32


@gluon.jit
def _either(a, b):
    return a | b


@gluon.jit
def _told(memory, STREAM: gl.constexpr):
    """The bits of a stream's turns that have to be taken again, of any row."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    PARTS: gl.constexpr = memory.wrong.shape[1] // 32
    rows = memory.wrong.index(STREAM)._reinterpret(gl.int32, [PARTS, 32], FLAT)
    word = rows.index(0).load(LAYOUT)
    for i in gl.static_range(1, PARTS):
        word = word | rows.index(i).load(LAYOUT)
    return gl.reduce(word, 0, _either)
