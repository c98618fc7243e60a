import multiprocessing
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from pagetile.tiles.cpu import threads
from pagetile.tiles.cpu.compile import allocating, entry, inner
from pagetile.tiles.cpu.simd import take_number
from pagetile.tiles.cpu.threads import on_team, run_together


@entry()
def _count(parallel, num_threads, counter, done, size):
    on_team(parallel, num_threads, _make_scratch, _take_items, (counter, done, size))


@allocating()
def _make_scratch(counter, done, size):
    return np.zeros(size)


@inner()
def _take_items(counter, done, size, scratch):
    """Write into ``done[i]`` how many items this call has taken when it takes item i."""
    while True:
        taken = take_number(counter)
        if taken >= len(done):
            return
        scratch[0] += 1
        done[taken] += scratch[0]


@entry()
def _meet(parallel, num_threads, arrived, turns, num_calls):
    on_team(parallel, num_threads, _no_scratch, _wait_for_all, (arrived, turns, num_calls))


@allocating()
def _no_scratch(arrived, turns, num_calls):
    return np.zeros(1)


@inner()
def _wait_for_all(arrived, turns, num_calls, scratch):
    """Return when ``num_calls`` calls are here at once, or after some seconds."""
    take_number(arrived)
    for _ in range(1 << 28):
        take_number(turns)  # an atomic, after which numbers are read anew
        if arrived[0] >= num_calls:
            return
    arrived[0] = -1


@pytest.fixture(params=["torch's team", "plain threads"])
def run(request, monkeypatch):
    torch.ones(1 << 16).sum()  # torch has loaded what it runs on
    if request.param == "plain threads":
        monkeypatch.setattr(threads, "_openmp", lambda process: None)
    elif threads._openmp(os.getpid()) is None:
        pytest.skip("torch runs on no libgomp here")
    return run_together


def test_one_thread_takes_all_items_in_order(run):
    done = np.zeros(100)
    run(_count, 1, np.zeros(1, np.int64), done, 1)
    assert done.tolist() == list(range(1, 101))


@pytest.mark.parametrize("num_threads", [2, 3])
def test_as_many_threads_as_asked_for_take_part(run, num_threads):
    if num_threads - 1 > (os.cpu_count() or 1):
        pytest.skip("more threads than a machine has cores are not promised")
    arrived = np.zeros(1, np.int64)
    run(_meet, num_threads, arrived, np.zeros(1, np.int64), num_threads)
    assert arrived[0] == num_threads  # reached only while all of them are running


def test_shared_work_is_done_once(run):
    for _ in range(100):
        done = np.zeros(2000)
        run(_count, 3, np.zeros(1, np.int64), done, 1)
        assert (done > 0).all()
        assert (done == 1).sum() <= 3  # each call counts from one


def test_memory_that_cannot_be_had_is_an_error(run):
    done = np.zeros(10)
    with pytest.raises(MemoryError):
        run(_count, 2, np.zeros(1, np.int64), done, 1 << 55)
    assert not done.any()
    run(_count, 2, np.zeros(1, np.int64), done, 1)
    assert done.all()


def test_many_callers_at_once_do_not_wait_for_each_other(run):
    """Each caller completes its own work while other threads are busy."""

    def call(number):
        for _ in range(20):
            done = np.zeros(300)
            run(_count, 3, np.zeros(1, np.int64), done, 1)
            assert (done > 0).all()
        return number

    with ThreadPoolExecutor(6) as callers:
        assert list(callers.map(call, range(6))) == list(range(6))


FORK = """
import multiprocessing
import numpy
import torch
import pagetile

def meet():
    from pagetile.tiles.cpu import threads

    if {plain}:
        threads._openmp = lambda process: None
    q = torch.from_numpy(numpy.ones((1, 8, 300, 16), "f"))  # torch itself waits for its team
    assert (pagetile.attention_scores(q, q, impl="cpu").numpy() == 16).all()

torch.ones(1 << 20).sum()
for number_of_meetings in range(2):  # children of a process without a team, and of one with it
    child = multiprocessing.get_context("fork").Process(target=meet)
    child.start()
    child.join(100)
    assert child.exitcode == 0, (number_of_meetings, child.exitcode)
    meet()
"""


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="no fork here")
@pytest.mark.parametrize("plain", [False, True], ids=["openmp", "plain"])
def test_a_forked_child_has_threads_of_its_own(plain):
    """Whether the child computes first, or its parent computed before it forked."""
    program = FORK.format(plain=plain)
    subprocess.run([sys.executable, "-c", program], check=True, timeout=200)
