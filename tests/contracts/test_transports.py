"""The Transport contract, asked of references, of shared memory between threads and between spawned processes."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from m2flow import protocols
from m2flow.comm import shared, shared_segment
from m2flow.comm.transport import TABLE, Closed, Location, Reference, SharedMemory, choose
from m2flow.types import Action, Report, Trajectory, Units
from tests.contracts import transport_peers as peers
from tests.contracts.channel_suite import WAIT, Background, until

PROTOCOLS = ("Transport",)
SPAWN = multiprocessing.get_context("spawn")
LARGE = 300_000  # float64 numbers: 2.4 MB, far above what travels in a frame


class Links:
    """Starts peers of one kind and ends them."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.ends: list[Any] = []
        self.processes: list[Any] = []
        self.threads: list[threading.Thread] = []

    def start(self, program: Any, *args: Any, **settings: Any) -> Any:
        """Our end of a link whose other end runs `program`."""
        make = Reference if self.kind == "reference" else SharedMemory
        here, there = make.pair(name="l", ends=("me", "peer"), **settings)
        if self.kind == "processes":
            process = SPAWN.Process(target=program, args=(there, *args), daemon=True)
            process.start()
            there.detach()
            self.processes.append(process)
        else:
            thread = threading.Thread(target=program, args=(there, *args), daemon=True)
            thread.start()
            self.threads.append(thread)
            self.ends.append(there)
        self.ends.append(here)
        return here

    def stop(self) -> None:
        for end in reversed(self.ends):
            end.close()
        for thread in self.threads:
            thread.join(WAIT)
            assert not thread.is_alive()
        for process in self.processes:
            process.join(WAIT)
            assert process.exitcode is not None
            process.close()


@pytest.fixture(params=["reference", "threads", "processes"])
def links(request):
    made = Links(request.param)
    yield made
    made.stop()


@pytest.fixture
def processes():
    made = Links("processes")
    yield made
    made.stop()


def trajectory(lanes: int) -> Trajectory:
    at = np.arange(2 * lanes).reshape(2, lanes)
    return Trajectory(
        obs={"state": np.random.default_rng(0).normal(size=(3 * lanes, 11))},
        obs_at=at,
        next_at=at + lanes,
        reward=np.ones((2, lanes, 1), np.float32),
        valid=np.ones((2, lanes, 1), bool),
        terminated=np.zeros((2, lanes), bool),
        truncated=np.zeros((2, lanes), bool),
        version=at,
        episode=at,
        group=at,
        lane=np.arange(lanes),
        units=Units(("dim",), np.ones((2 * lanes, 3)), {"action": np.ones((2 * lanes, 3))}),
    )


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, (np.ndarray, torch.Tensor)):
        return type(a) is type(b) and a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    if hasattr(a, "__dataclass_fields__"):
        return type(a) is type(b) and all(equal(getattr(a, f), getattr(b, f)) for f in a.__dataclass_fields__)
    return type(a) is type(b) and a == b


PAYLOADS = {
    "nothing": None,
    "text": "x" * 10,
    "long text": "é" * 200_000,
    "message": ("call", 3, "rollout/0", {"state": np.zeros((8, 39))}, np.ones(3, np.float32), [1.5, True, None]),
    "small trajectory": trajectory(4),
    "large trajectory": trajectory(3000),
    "large": np.arange(LARGE, dtype=np.float64),
    "strided": np.arange(2.0 * LARGE).reshape(2, LARGE).T,
    "mixed": {"a": np.zeros((0, 3)), "b": np.array(True), "c": np.arange(LARGE)[::-2], "d": b"\x00" * 100_000},
    "tensors": {"w": torch.ones(200, 300, dtype=torch.bfloat16).t(), "n": torch.arange(5)},
    "report": Report(4, payload={"pids": [1, 2]}),
    "action": Action(np.zeros((2, 1, 3)), np.zeros((2, 1, 3)), {"a": np.ones(2)}, version=3),
}


def test_all_kinds_of_payload_arrive_as_they_were_in_order(links):
    end = links.start(peers.echo)
    for name, payload in PAYLOADS.items():
        end.send(payload, timeout=WAIT)
        assert equal(end.recv(timeout=WAIT), payload), name
    for name, payload in list(PAYLOADS.items())[:4]:
        end.send((name, payload), timeout=WAIT)
    assert [end.recv(timeout=WAIT)[0] for _ in range(4)] == list(PAYLOADS)[:4]


def test_it_has_the_methods_of_the_protocol(links):
    end = links.start(peers.echo)
    for method in ("send", "recv", "close"):
        assert callable(getattr(end, method))
        assert hasattr(protocols.Transport, method)


def test_sizes_around_the_border_of_the_frame(links):
    end = links.start(peers.echo)
    for size in (*range(shared.INLINE - 200, shared.INLINE + 200, 37), shared.INLINE * 5 - 13, shared_segment.SMALLEST):
        payload = np.arange(size, dtype=np.uint8)
        end.send(payload, timeout=WAIT)
        assert equal(end.recv(timeout=WAIT), payload), size


def test_large_and_small_messages_keep_their_order(links):
    end = links.start(peers.echo)
    sizes = [10, LARGE, 3, 20_000, 0, LARGE // 3, 5, LARGE * 2, 1] * 4

    def produce():
        for n, size in enumerate(sizes):
            end.send({"n": n, "x": np.full(size, n)}, timeout=WAIT)

    producing = Background(produce)
    for n, size in enumerate(sizes):
        got = end.recv(timeout=WAIT)
        assert got["n"] == n
        assert equal(got["x"], np.full(size, n))
    assert producing.result() is None


def test_many_threads_share_an_end_and_nothing_is_lost_or_mixed(links):
    end, each = links.start(peers.echo), 60

    def produce(producer):
        for n in range(each):
            end.send((producer, n, np.full(50 if n % 5 else 30_000, 100 * producer + n)), timeout=WAIT)

    def consume():
        got = []
        for _ in range(each):
            producer, n, x = end.recv(timeout=WAIT)
            assert (x == 100 * producer + n).all()
            got.append((producer, n))
        return got

    producers = [Background(lambda p=p: produce(p)) for p in range(3)]
    consumers = [Background(consume) for _ in range(3)]
    got = [consumer.result() for consumer in consumers]
    assert all(producer.result() is None for producer in producers)
    assert sorted(item for part in got for item in part) == [(p, n) for p in range(3) for n in range(each)]


def test_send_waits_when_nobody_receives_and_goes_on_when_somebody_does(links):
    end = links.start(peers.late_echo, 0.6, messages=2)
    end.send(0, timeout=WAIT)
    end.send(1, timeout=WAIT)
    with pytest.raises(TimeoutError, match=r"'l': me .*has waited 0\.1 s .*(send; peer|put weight 1 for peer)"):
        end.send("never", timeout=0.1)
    end.send(2, timeout=WAIT)
    assert [end.recv(timeout=WAIT) for _ in range(3)] == [0, 1, 2]  # what timed out was not sent


def test_large_messages_wait_too(links):
    end = links.start(peers.late_echo, 0.6, messages=8)
    sent = 0
    try:
        for _ in range(20):
            end.send(np.full(LARGE, sent), timeout=0.05)
            sent += 1
    except TimeoutError:
        pass
    assert 0 < sent <= 8
    for n in range(sent):
        assert (end.recv(timeout=WAIT) == n).all()
    end.send("after", timeout=WAIT)
    assert end.recv(timeout=WAIT) == "after"


def test_whatever_the_size_a_send_that_timed_out_has_sent_nothing(links):
    end = links.start(peers.late_echo, 0.8, messages=64)
    sizes = [8_000, 100, 3_000, LARGE, 1, 7_000, LARGE * 2]  # float64 numbers
    sent: list[int] = []
    refused = 0
    for n in range(200):
        try:
            end.send(np.full(sizes[n % len(sizes)], n), timeout=0.01)
            sent.append(n)
        except TimeoutError:
            refused += 1
            if refused == 15:
                break
    assert refused
    receiving = Background(lambda: [end.recv(timeout=WAIT) for _ in range(len(sent) + 1)])
    end.send("last", timeout=WAIT)
    *arrays, last = receiving.result()
    assert last == "last"
    for n, array in zip(sent, arrays, strict=True):
        assert equal(array, np.full(sizes[n % len(sizes)], n))


def test_a_recv_that_timed_out_says_who_waited_and_loses_nothing(links):
    end = links.start(peers.late_echo, 0.3)
    end.send("x", timeout=WAIT)
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"'l': me .*has waited 0\.1 s (for a message from peer|.*from peer)"):
        end.recv(timeout=0.1)
    assert 0.1 <= time.monotonic() - began < 5.0
    assert end.recv(timeout=WAIT) == "x"
    with pytest.raises(TimeoutError):
        end.recv(timeout=0.0)


def test_a_recv_without_patience_takes_what_is_there(links):
    end = links.start(peers.burst, 2)
    got = []

    def look() -> bool:
        try:
            got.append(end.recv(timeout=0.0)["n"])
        except TimeoutError:
            return False
        return len(got) == 2

    until(look)
    assert got == [0, 1]


def test_what_was_sent_before_a_close_still_arrives_then_closed(links):
    end = links.start(peers.burst, 40)
    for n in range(40):
        got = end.recv(timeout=WAIT)
        assert equal(got, {"n": n, "x": np.full(n % 7, n)})
    with pytest.raises(Closed):
        end.recv(timeout=WAIT)
    with pytest.raises(Closed):
        end.send("anybody?", timeout=WAIT)


def test_large_messages_outlive_their_sender(links):
    end = links.start(peers.large_then_close, 3)
    time.sleep(0.2)
    assert [int(end.recv(timeout=WAIT)[-1]) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(Closed):
        end.recv(timeout=WAIT)


def test_close_wakes_this_end_and_that_end(links):
    end = links.start(peers.echo)
    receiving = Background(end.recv)
    assert receiving.waits
    end.close()
    assert isinstance(receiving.result(), Closed)
    end.close()  # again is no harm
    for call in (end.recv, lambda: end.send(1)):
        with pytest.raises(Closed):
            call()


def test_close_wakes_a_blocked_send(links):
    end = links.start(peers.deaf, messages=1)
    end.send(0, timeout=WAIT)
    sending = Background(lambda: end.send(1))
    assert sending.waits
    end.close()
    assert isinstance(sending.result(), Closed)


def test_a_number_of_messages_that_makes_no_sense_is_refused():
    for make in (Reference, SharedMemory):
        for number in (0, -1, 1000):
            with pytest.raises(ValueError, match=f"messages must be between 1 and 128, got {number}"):
                make.pair(messages=number)


# ---- shared memory only


def test_a_payload_that_cannot_travel_is_refused_and_the_link_lives_on(processes):
    end = processes.start(peers.echo)
    with pytest.raises(ValueError, match=r"payload\['f'\]: cannot pack a builtins.function"):
        end.send({"f": lambda: 0})
    with pytest.raises(ValueError, match="a tensor on meta cannot leave its process"):
        end.send(torch.ones(2, device="meta"))
    end.send("still here", timeout=WAIT)
    assert end.recv(timeout=WAIT) == "still here"


def test_exceptions_and_configs_travel_between_own_processes(processes):
    end = processes.start(peers.echo)
    end.send({"error": ValueError("x"), "place": Location("h", 1)}, timeout=WAIT)
    got = end.recv(timeout=WAIT)
    assert repr(got["error"]) == "ValueError('x')"
    assert got["place"] == Location("h", 1)


def test_the_other_process_loads_torch_only_for_tensors(processes):
    end = processes.start(peers.modules)
    end.send({"x": np.ones(3)}, timeout=WAIT)
    assert end.recv(timeout=WAIT) == (False, False)


def test_a23_a_killed_peer_is_seen_at_once_by_blocked_calls(processes):
    end = processes.start(peers.die_after, 0, messages=1)
    pid = end.recv(timeout=WAIT)
    receiving = Background(end.recv)
    end.send("credit is used up", timeout=WAIT)
    sending = Background(lambda: end.send("blocked"))
    assert receiving.waits
    assert sending.waits
    os.kill(pid, signal.SIGKILL)
    killed = time.monotonic()
    for call in (receiving, sending):
        outcome = call.result()
        assert isinstance(outcome, Closed)
        assert "peer is gone" in str(outcome)
    assert time.monotonic() - killed < 2.0


def descriptors() -> list[str]:
    out = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            out.append(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:
            continue
    return out


def segments_open() -> int:
    return sum("memfd:m2flow" in target for target in descriptors())


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="no memfd here")
def test_nothing_is_left_behind_when_a_process_is_killed_in_the_middle(processes):
    shm = set(os.listdir("/dev/shm"))
    end = processes.start(peers.die_after, 1)
    pid = end.recv(timeout=WAIT)
    for _ in range(3):
        end.send(np.ones(LARGE), timeout=WAIT)
    assert segments_open() >= 2
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(Closed):
        end.recv(timeout=WAIT)
    assert set(os.listdir("/dev/shm")) <= shm
    end.close()
    assert segments_open() == 0


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="no memfd here")
def test_segments_are_used_again_and_replaced_when_too_small(processes):
    end = processes.start(peers.echo)
    for size in (LARGE, LARGE // 2, LARGE):
        for n in range(10):
            end.send(np.full(size, n), timeout=WAIT)
            assert (end.recv(timeout=WAIT) == n).all()
    assert segments_open() == 2  # one of ours, one of theirs
    for size in (4 * LARGE, LARGE, 16 * LARGE, LARGE):
        end.send(np.ones(size), timeout=WAIT)
        assert len(end.recv(timeout=WAIT)) == size
    assert segments_open() == 2


def test_without_memfd_an_unlinked_file_serves(monkeypatch, tmp_path):
    monkeypatch.delattr(os, "memfd_create", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    a, b = SharedMemory.pair()
    for n in range(3):
        a.send(np.full(LARGE, n))
        assert list(tmp_path.iterdir()) == []
        assert any(str(tmp_path) in target for target in descriptors())
        assert (b.recv() == n).all()
    a.close()
    b.close()
    assert not any(str(tmp_path) in target for target in descriptors())


def test_what_arrives_is_not_overwritten_by_later_messages():
    a, b = SharedMemory.pair()
    kept = []
    for n in range(6):
        a.send({"x": np.full(LARGE, n), "t": torch.full((LARGE,), float(n))})
        kept.append(b.recv())
    for n, got in enumerate(kept):
        assert (got["x"] == n).all()
        assert (got["t"] == n).all()
        got["x"] += 1  # it is ours
    a.close()
    b.close()


def test_an_error_on_arrival_hurts_one_message_only():
    a, b = SharedMemory.pair()

    class Local:
        pass

    Local.__qualname__ = Local.__name__ = "NotHere"
    globals()["NotHere"] = Local
    for payload in ([Local()], [Local(), np.ones(LARGE)]):
        a.send(payload)
    del globals()["NotHere"]
    a.send("fine")
    errors = []
    for _ in range(2):
        with pytest.raises(AttributeError) as caught:
            b.recv()
        errors.append(caught)  # its traceback holds on to the segment
    assert b.recv() == "fine"
    a.close()
    b.close()


def test_ends_are_given_to_spawned_processes_only(tmp_path):
    with pytest.raises(ValueError, match="use spawn"):
        SharedMemory.pair(multiprocessing.get_context("fork"))
    a, b = SharedMemory.pair(SPAWN)
    b.detach()
    with pytest.raises(ValueError, match="was detached"):
        pickle.dumps(b)
    with pytest.raises(Closed):
        b.recv()
    a.close()
    assert list(Path(tmp_path).iterdir()) == []


# ---- the table


@pytest.mark.parametrize(
    ("src", "dst", "expected"),
    [
        (Location("h", 1), Location("h", 1), Reference),
        (Location("h", 1, "gpu:0"), Location("h", 1, "cpu"), Reference),
        (Location("h", 1), Location("h", 2), SharedMemory),
        (Location("h", 1), Location("g", 1), "other host"),
        (Location("h", 1, "gpu:0"), Location("h", 2, "gpu:0"), "CUDA IPC"),
        (Location("h", 1, "gpu:0"), Location("h", 2, "gpu:1"), "NCCL"),
        (Location("h", 1, "gpu:0"), Location("h", 2, "cpu"), "between a GPU and another process"),
    ],
)
def test_choose_is_a_table(src, dst, expected):
    if isinstance(expected, str):
        with pytest.raises(ValueError, match="arrives with the ray runtime") as caught:
            choose(src, dst)
        assert expected in str(caught.value)
    else:
        assert choose(src, dst) is choose(dst, src) is expected
    assert len(TABLE) == 6
