"""Signals set a flag and are given back."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from phalanx.dist import stop_signals
from phalanx.dist.stop_signals import STOP_SIGNALS, DelayedMax, StopFlag, agreement_for


@pytest.fixture(autouse=True)
def _handlers_come_back() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    after = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    for number, handler in before.items():
        signal.signal(number, handler)
    assert after == before


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_sets_the_flag_and_the_process_goes_on(number: int) -> None:
    flag = StopFlag()
    flag.install()
    assert flag.signal == 0
    os.kill(os.getpid(), number)
    assert flag.signal == number
    flag.close()


def test_the_previous_handler_is_called_after() -> None:
    calls: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: calls.append(flag.signal))
    flag = StopFlag()
    flag.install()
    os.kill(os.getpid(), signal.SIGUSR1)
    assert calls == [signal.SIGUSR1]
    flag.close()
    os.kill(os.getpid(), signal.SIGUSR1)
    assert len(calls) == 2
    signal.signal(signal.SIGUSR1, before)


def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    flag = StopFlag()
    flag.install()
    os.kill(os.getpid(), signal.SIGINT)
    assert flag.signal == 0
    flag.close()
    assert signal.signal(signal.SIGINT, before) == signal.SIG_IGN


def test_a_second_interrupt_acts_at_once_and_an_echo_of_the_first_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flag = StopFlag()
    flag.install()
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGINT)
    assert flag.signal == signal.SIGINT
    monkeypatch.setattr(stop_signals, "_REPEAT_S", -1.0)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    flag.close()


def test_off_the_main_thread_nothing_is_taken_over() -> None:
    flag = StopFlag()
    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=flag.install)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_forked_child_dies_of_the_signal_as_if_nothing_were_there() -> None:
    flag = StopFlag()
    flag.install()
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writing, b"x")  # Python drops a signal that comes while it is still forking
        for _ in range(3000):
            time.sleep(0.01)  # short naps: a signal that comes just before one is seen right after it
        os._exit(0)
    os.read(reading, 1)
    os.close(reading)
    os.close(writing)
    os.kill(pid, signal.SIGTERM)
    _, status = os.waitpid(pid, 0)
    flag.close()
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGTERM


def test_with_one_rank_a_value_is_agreed_at_once() -> None:
    import torch

    agree = agreement_for(1, torch.device("cpu"))
    assert isinstance(agree, DelayedMax)
    assert [agree(0), agree(3), agree(0)] == [0, 3, 0]
