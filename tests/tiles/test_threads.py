import multiprocessing
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from pagetile.tiles.cpu import threads
from pagetile.tiles.cpu.threads import run_together


@pytest.fixture(params=["torch's team", "plain threads"])
def run(request, monkeypatch):
    torch.ones(1 << 16).sum()  # torch has loaded what it runs on
    if request.param == "plain threads":
        monkeypatch.setattr(threads, "_openmp", lambda process: None)
    elif threads._openmp(os.getpid()) is None:
        pytest.skip("torch runs on no libgomp here")
    return run_together


def test_one_thread_is_the_callers_own(run):
    idents = []
    run(lambda: idents.append(threading.get_ident()), 1)
    assert idents == [threading.get_ident()]


@pytest.mark.parametrize("num_threads", [2, 3])
def test_as_many_threads_as_asked_for_take_part_and_the_caller_is_one(run, num_threads):
    if num_threads - 1 > (os.cpu_count() or 1):
        pytest.skip("more threads than a machine has cores are not promised")
    idents, everyone = [], threading.Barrier(num_threads)

    def meet():
        idents.append(threading.get_ident())
        everyone.wait(timeout=60)  # reached only while all of them are running

    run(meet, num_threads)
    assert len(set(idents)) == num_threads
    assert threading.get_ident() in idents


def test_all_calls_have_ended_when_it_returns(run):
    for _ in range(50):
        running = []

        def work(running=running):
            running.append(1)
            time.sleep(0.001)
            running.pop()

        run(work, 2)
        assert not running


def test_shared_work_is_done_once(run):
    for _ in range(100):
        left, done, lock = list(range(200)), [], threading.Lock()

        def work(left=left, done=done, lock=lock):
            while True:
                with lock:
                    if not left:
                        return
                    done.append(left.pop())

        run(work, 3)
        assert sorted(done) == list(range(200))


def test_an_error_is_raised_when_all_calls_have_ended(run):
    ended, here = [], threading.get_ident()
    both = threading.Barrier(2)

    def fail_elsewhere():
        both.wait(timeout=60)
        if threading.get_ident() != here:
            raise KeyError("elsewhere")
        time.sleep(0.01)
        ended.append(1)

    with pytest.raises(KeyError, match="elsewhere"):
        run(fail_elsewhere, 2)
    assert ended

    def fail():
        raise ValueError("everywhere")

    with pytest.raises(ValueError, match="everywhere"):
        run(fail, 2)
    with pytest.raises(ValueError, match="everywhere"):
        run(fail, 1)
    run(lambda: ended.append(2), 2)
    assert 2 in ended


def test_many_callers_at_once_do_not_wait_for_each_other(run):
    """Each caller is enough to do its own work, whatever holds the other threads."""

    def call(number):
        taken, numbers = [], iter(range(100))
        lock = threading.Lock()

        def work():
            while True:
                with lock:
                    value = next(numbers, None)
                if value is None:
                    return
                taken.append((number, value))

        for _ in range(20):
            run(work, 3)
        return taken

    with ThreadPoolExecutor(6) as callers:
        for number, taken in enumerate(callers.map(call, range(6))):
            assert sorted(taken) == [(number, value) for value in range(100)]


FORK = """
import multiprocessing, threading
import torch
import pagetile

def meet():
    from pagetile.tiles.cpu import threads

    if {plain}:
        threads._openmp = lambda process: None
    both = threading.Barrier(2)
    threads.run_together(lambda: both.wait(timeout=60), 2)

torch.ones(1 << 20).sum()
if {first}:
    meet()
child = multiprocessing.get_context("fork").Process(target=meet)
child.start()
child.join(100)
assert child.exitcode == 0, child.exitcode
meet()
"""


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="no fork here")
@pytest.mark.parametrize("first", [False, True], ids=["child first", "parent first"])
@pytest.mark.parametrize("plain", [False, True], ids=["openmp", "plain"])
def test_a_forked_child_has_threads_of_its_own(plain, first):
    program = FORK.format(plain=plain, first=first)
    subprocess.run([sys.executable, "-c", program], check=True, timeout=200)
