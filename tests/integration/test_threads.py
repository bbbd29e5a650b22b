from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref

import pytest

from weightsync.server.threads import DaemonThreadPool


def test_calls_run_and_answer() -> None:
    """A call's result and its exception both reach the one who waits."""
    pool = DaemonThreadPool(2, "test")
    assert pool.submit(divmod, 7, 2).result() == (3, 1)
    with pytest.raises(ZeroDivisionError):
        pool.submit(divmod, 7, 0).result()
    pool.shutdown()


def test_threads_are_bounded_and_used_again() -> None:
    """More calls than threads wait for their turn, and all of them run."""
    pool = DaemonThreadPool(3, "test")
    together = threading.Barrier(3)
    futures = [pool.submit(together.wait, 60) for _ in range(9)]
    assert sorted(future.result() for future in futures) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    names = {pool.submit(lambda: threading.current_thread().name).result() for _ in range(9)}
    assert names <= {f"test-{i}" for i in range(3)}
    pool.shutdown()


def test_an_idle_thread_keeps_no_arguments() -> None:
    """What a call was given is free once the call is over."""

    class Big:
        pass

    pool = DaemonThreadPool(1, "test")
    big = Big()
    gone = weakref.ref(big)
    pool.submit(id, big).result()
    del big
    pool.submit(int).result()
    gc.collect()
    assert gone() is None
    pool.shutdown()


def test_a_closed_pool_takes_no_calls() -> None:
    """After shutdown a call is refused, and a second shutdown is harmless."""
    pool = DaemonThreadPool(1, "test")
    pool.submit(int).result()
    pool.shutdown()
    pool.shutdown()
    with pytest.raises(RuntimeError):
        pool.submit(int)


def test_a_waiting_call_does_not_keep_the_process_alive() -> None:
    """A program ends although a handler waits for something that never comes."""
    program = (
        "import threading\n"
        "from weightsync.server.threads import DaemonThreadPool\n"
        "started = threading.Event()\n"
        "def wait():\n"
        "    started.set()\n"
        "    threading.Event().wait()\n"
        "DaemonThreadPool(1, 'test').submit(wait)\n"
        "started.wait()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
