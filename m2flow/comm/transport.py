"""Transports: one payload from producer to consumer, in order, bounded, in both directions.

`choose(src, dst)` is the whole table:

    same process                  Reference      the object itself, no copy: who has sent it must not change it
    same host, host memory        SharedMemory   two copies: into the segment, and out of it
    same GPU, GPU to GPU,         --             named and refused: they arrive with the ray runtime
    GPU to host, other host

A transport end may be used by any number of threads. `pair()` makes both ends of one.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from m2flow.comm.channel import Channel
from m2flow.comm.shared import MAX_MESSAGES, Receiver, Sender
from m2flow.comm.waiting import Closed
from m2flow.types import Tree

__all__ = ["Closed", "Location", "Reference", "SharedMemory", "choose"]


@dataclass(frozen=True, slots=True)
class Location:
    """Where one end of a transport is, and on which device its payloads lie: `Location("node-a", 4711, "gpu:0")`."""

    host: str
    process: int
    device: str = "cpu"

    @property
    def on_gpu(self) -> bool:
        """Whether payloads lie in a GPU's memory."""
        return self.device.startswith("gpu")


class Reference:
    """Both ends in one process: payloads are handed over as they are."""

    def __init__(self, outbound: Channel, inbound: Channel) -> None:
        self._outbound, self._inbound = outbound, inbound

    @classmethod
    def pair(
        cls, *, messages: int = 64, name: str = "link", ends: tuple[str, str] = ("a", "b")
    ) -> tuple[Reference, Reference]:
        """Two connected ends; `messages` may wait to be received, per direction."""
        there = Channel(name, capacity=_checked(messages), producer=ends[0], consumer=ends[1])
        back = Channel(name, capacity=messages, producer=ends[1], consumer=ends[0])
        return cls(there, back), cls(back, there)

    def send(self, payload: Tree, timeout: float | None = None) -> None:
        """Hand over; waits while `messages` are unreceived. Closed when the other end is."""
        self._outbound.put(payload, timeout=timeout)

    def recv(self, timeout: float | None = None) -> Tree:
        """The next payload. Closed when this end is, or when the other end is and nothing is left."""
        return self._inbound.get(timeout=timeout)[0]

    def close(self) -> None:
        """The other end still receives what was sent, then Closed."""
        self._outbound.close()
        self._inbound.fail(Closed(f"link {self._inbound.name!r}: {self._inbound.consumer} has closed it"))


class SharedMemory:
    """Ends in two processes of one host (or two threads).

    A message is a frame on a Unix socket. Up to 64 KiB the payload is in the frame; above, it is in a shared memory
    segment whose descriptor the frame carries the first time. The receiver copies it out and acknowledges, which lets
    the segment be used again: at most 4 segments are in flight per direction. Nothing has a name in the file system, so
    nothing is left behind when a process is killed; the other end sees `Closed`.

    An end can be given to a spawned process as an argument; then `detach()` it here, or a death will not be noticed.
    """

    def __init__(self, out: socket.socket, into: socket.socket, messages: int, name: str, me: str, peer: str) -> None:
        self._sockets = (out, into)
        self._messages, self._name, self._me, self._peer = messages, name, me, peer
        self._sender, self._receiver = Sender(out, messages), Receiver(into)
        self._send_lock, self._recv_lock = threading.Lock(), threading.Lock()
        self._closed = False

    @classmethod
    def pair(
        cls, context: Any = None, *, messages: int = 64, name: str = "link", ends: tuple[str, str] = ("a", "b")
    ) -> tuple[SharedMemory, SharedMemory]:
        """Two connected ends. `context`: the multiprocessing context that starts the other process; not "fork".

        At most `messages` wait to be received per direction; fewer when they fill the socket's buffer (about 200 KB),
        and of large ones 4.
        """
        if context is not None and context.get_start_method() == "fork":
            raise ValueError("shared memory: a forked process inherits both ends, so no death is noticed; use spawn")
        _checked(messages)
        there, back = socket.socketpair(), socket.socketpair()
        first = cls(there[0], back[1], messages, name, *ends)
        return first, cls(back[0], there[1], messages, name, ends[1], ends[0])

    def send(self, payload: Tree, timeout: float | None = None) -> None:
        """Copy the payload on its way; waits while `messages` are unreceived. Closed when the other end is gone.

        ValueError for what cannot travel. After a TimeoutError nothing was sent.
        """
        self._locked(self._send_lock, lambda deadline: self._sender.send(payload, deadline), timeout, self._send_story)

    def recv(self, timeout: float | None = None) -> Tree:
        """The next payload, owned by the caller. Closed when this end is, or the other is gone and nothing is left."""
        return self._locked(self._recv_lock, self._receiver.recv, timeout, self._recv_story)

    def close(self) -> None:
        """Free sockets and segments; a blocked send or recv of this end raises Closed, the other end sees Closed."""
        self._closed = True
        for end in reversed(self._sockets):  # the one we read first: who sees our end of file cannot send any more
            try:
                end.shutdown(socket.SHUT_RDWR)  # wakes whoever is blocked in it
            except OSError:
                continue  # not connected any more
        self._release()

    def detach(self) -> None:
        """Forget this copy of the end, because another process has it. It stays connected there."""
        self._closed = True
        self._release()

    def _release(self) -> None:
        with self._send_lock, self._recv_lock:
            for end in self._sockets:
                end.close()
            self._sender.close()
            self._receiver.close()

    def _locked(
        self,
        lock: threading.Lock,
        call: Callable[[float | None], Any],
        timeout: float | None,
        story: Callable[[float], str],
    ) -> Any:
        deadline = None if timeout is None else time.monotonic() + max(0.0, timeout)
        if not lock.acquire(timeout=-1 if timeout is None else max(0.0, timeout)):
            raise TimeoutError(story(timeout or 0.0))
        try:
            if self._closed:
                raise Closed(f"link {self._name!r}: {self._me} has closed it")
            return call(deadline)
        except TimeoutError:
            raise TimeoutError(story(timeout or 0.0)) from None
        except (ConnectionError, EOFError) as error:
            who = f"{self._me} has closed it" if self._closed else f"{self._peer} is gone ({error or 'end of file'})"
            raise Closed(f"link {self._name!r}: {who}") from error
        finally:
            lock.release()

    def _send_story(self, timeout: float) -> str:
        return (
            f"link {self._name!r}: {self._me} has waited {timeout:.1f} s to send; {self._peer} has not received what "
            f"was sent before (at most {self._messages} messages may wait)"
        )

    def _recv_story(self, timeout: float) -> str:
        return f"link {self._name!r}: {self._me} has waited {timeout:.1f} s for a message from {self._peer}"

    def __reduce__(self) -> Any:
        if self._closed:
            raise ValueError(f"link {self._name!r}: this end is closed or was detached")
        return SharedMemory, (*self._sockets, self._messages, self._name, self._me, self._peer)


# (kind of link, whether it holds, transport); the first row that holds is taken
_Row = tuple[str, Callable[[Location, Location], bool], type[Reference | SharedMemory] | None]
TABLE: tuple[_Row, ...] = (
    ("same process", lambda a, b: (a.host, a.process) == (b.host, b.process), Reference),
    ("other host", lambda a, b: a.host != b.host, None),
    ("same GPU (CUDA IPC)", lambda a, b: a.on_gpu and a.device == b.device, None),
    ("GPU to GPU (NCCL)", lambda a, b: a.on_gpu and b.on_gpu, None),
    ("between a GPU and another process", lambda a, b: a.on_gpu or b.on_gpu, None),
    ("same host", lambda _a, _b: True, SharedMemory),
)


def choose(src: Location, dst: Location) -> type[Reference | SharedMemory]:
    """The transport between two places. ValueError for links that need the ray runtime."""
    kind, transport = next((kind, transport) for kind, holds, transport in TABLE if holds(src, dst))
    if transport is None:
        raise ValueError(
            f"transport from {src} to {dst}: '{kind}' arrives with the ray runtime; until then keep both ends in one "
            "process, or on one host with payloads in host memory (device 'cpu')"
        )
    return transport


def _checked(messages: int) -> int:
    if not 1 <= messages <= MAX_MESSAGES:
        raise ValueError(f"transport: messages must be between 1 and {MAX_MESSAGES}, got {messages}")
    return messages
