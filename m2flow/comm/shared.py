"""The two halves of a shared memory link: frames over a Unix socket, large payloads in shared segments.

    frame     kind | new | header bytes | body bytes | segment | dropped segment      24 bytes, then header and body
              (kind INLINE), or nothing (kind SEGMENT: header and body lie in the segment)
    ack       segment number, 0 for an inline message; 4 bytes, the other way on the same socket

Each direction has a socket of its own, so a sender reads nothing but acks and a receiver nothing but frames; neither
needs a thread. Deadlines are on time.monotonic(). Not thread-safe: SharedMemory holds the locks.
"""

from __future__ import annotations

import array
import os
import socket
import struct
import time
from collections import deque
from typing import Any

import numpy as np

from m2flow.comm import tree
from m2flow.comm.shared_segment import Pool, SharedSegment
from m2flow.types import Tree

Leaves = list[np.ndarray[Any, Any]]
Deadline = float | None

INLINE = 1 << 16  # bytes of header and body that still travel in the frame
MAX_MESSAGES = 128  # unread acks must fit the socket's buffer
BUFFER = 1 << 18  # bytes of frames in flight that the kernel is asked to hold; it doubles this, and may grant less
_FRAME = struct.Struct("<BBxxIQII")
_ACK = struct.Struct("<I")
WRITE_LIMIT = 10  # seconds in which a frame is written that there is room for; longer means the system stands still
MAX_SEGMENTS = 4  # large messages that may be unreceived, per direction; more would only hold memory
_FDS = socket.CMSG_SPACE(16 * array.array("i").itemsize)


class Sender:
    """Writes frames, reads acks.

    A frame is written only when it fits the socket's buffer beside those in flight. So a write does not stop half way,
    and a send that runs out of time has sent nothing.
    """

    def __init__(self, out: socket.socket, messages: int) -> None:
        self._socket, self._messages = out, messages
        self._pool = Pool()
        self._acks = b""
        out.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
        out.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", WRITE_LIMIT, 0))
        self._room = out.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        self._in_flight: deque[int] = deque()  # what each unacknowledged frame may cost of the room
        self._cost = 0

    def send(self, payload: Tree, deadline: Deadline) -> None:
        """One message. TimeoutError before anything was written; EOFError or ConnectionError when nobody reads."""
        header, leaves = tree.encode(payload, trusted=True)
        starts, size = tree.layout(leaves)
        if len(header) + size <= INLINE:
            frame = _FRAME.pack(0, 0, len(header), size, 0, 0)
            self._write(b"".join([frame, header, *_joined(leaves, starts, size)]), (), deadline)
        else:
            self._send_segment(header, leaves, starts, size, deadline)

    def _send_segment(self, header: bytes, leaves: Leaves, starts: list[int], size: int, deadline: Deadline) -> None:
        while len(self._pool.busy) >= MAX_SEGMENTS:
            self._read_acks(deadline)
        if not self._pool.free and self._pool.busy:
            self._read_acks(None, wait=False)
        offset = _body_offset(len(header))
        number, segment = self._pool.take(offset + size)
        try:
            memory = np.frombuffer(segment.map, np.uint8)
            memory[: len(header)] = np.frombuffer(header, np.uint8)
            for leaf, start in zip(leaves, starts, strict=True):
                place = memory[offset + start : offset + start + leaf.nbytes]
                np.copyto(place.view(leaf.dtype).reshape(leaf.shape), leaf)
            dropped = self._pool.dropped[0] if self._pool.dropped else 0
            frame = _FRAME.pack(1, not segment.known, len(header), size, number, dropped)
            self._write(frame, () if segment.known else (segment.fd,), deadline)
        except TimeoutError:
            self._pool.give_back(number)
            raise
        segment.introduced()
        if dropped:
            self._pool.dropped.popleft()

    def _write(self, data: bytes, fds: tuple[int, ...], deadline: Deadline) -> None:
        """All of `data`, when there is room for it."""
        cost = 1024 + 2 * len(data)  # a bound on what the kernel charges for a message of this size
        while len(self._in_flight) >= self._messages or (self._in_flight and self._cost + cost > self._room):
            self._read_acks(deadline)
        # No Python timeout: that polls first, and poll calls a socket writable only when it is three quarters empty.
        _set_timeout(self._socket, None)
        try:
            if fds:
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
                data = data[self._socket.sendmsg([data], rights) :]
            if data:
                self._socket.sendall(data)
        except BlockingIOError:  # SO_SNDTIMEO has passed: there was no room after all, and what follows would be torn
            raise ConnectionError("a message could not be written to its end") from None
        self._in_flight.append(cost)
        self._cost += cost

    def _read_acks(self, deadline: Deadline, *, wait: bool = True) -> None:
        if wait:
            _set_timeout(self._socket, deadline)
        else:
            self._socket.settimeout(0.0)
        try:
            data = self._socket.recv(4096)
        except BlockingIOError:
            if wait:
                raise TimeoutError from None
            return
        if not data:
            raise EOFError
        self._acks += data
        whole = len(self._acks) // _ACK.size * _ACK.size
        for (number,) in _ACK.iter_unpack(self._acks[:whole]):
            self._cost -= self._in_flight.popleft()  # acks come in the order of frames
            if number:
                self._pool.give_back(number)
        self._acks = self._acks[whole:]

    def close(self) -> None:
        """Free the segments."""
        self._pool.close()


class Receiver:
    """Reads frames, writes acks."""

    def __init__(self, into: socket.socket) -> None:
        self._socket = into
        self._buffer = bytearray(4 * INLINE)
        self._start = self._end = 0
        self._fds: deque[int] = deque()
        self._segments: dict[int, SharedSegment] = {}

    def recv(self, deadline: Deadline) -> Tree:
        """The next message, copied out. TimeoutError loses nothing; EOFError when nothing can come."""
        self._need(_FRAME.size, deadline)
        kind, new, header, body, number, dropped = _FRAME.unpack_from(self._buffer, self._start)
        size = _FRAME.size if kind else _FRAME.size + header + body
        self._need(size, deadline)
        start = self._start + _FRAME.size
        try:
            if kind:
                return self._from_segment(new, header, body, number, dropped)
            view = memoryview(self._buffer)[start : start + header + body]
            return tree.unpack_body(view[:header], view[header:], trusted=True)
        finally:
            self._start += size
            self._acknowledge(number)

    def _from_segment(self, new: int, header: int, body: int, number: int, dropped: int) -> Tree:
        if dropped:
            self._segments.pop(dropped).close()
        if new:
            fd = self._fds.popleft()
            self._segments[number] = SharedSegment(fd, os.fstat(fd).st_size)
            self._segments[number].introduced()
        view = memoryview(self._segments[number].map)
        offset = _body_offset(header)
        return tree.unpack_body(view[:header], view[offset : offset + body], trusted=True)

    def _need(self, size: int, deadline: Deadline) -> None:
        """Have `size` unread bytes in the buffer."""
        while self._end - self._start < size:
            if self._start and (self._start == self._end or self._start + size > len(self._buffer)):
                unread = bytes(self._buffer[self._start : self._end])
                self._buffer[: len(unread)] = unread
                self._start, self._end = 0, len(unread)
            _set_timeout(self._socket, deadline)
            room = memoryview(self._buffer)[self._end :]
            try:
                count, extra, flags, _ = self._socket.recvmsg_into([room], _FDS)
            except BlockingIOError:
                raise TimeoutError from None
            for level, kind, data in extra:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    fds = array.array("i")
                    fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
                    self._fds.extend(fds)
            if flags & socket.MSG_CTRUNC:
                raise ConnectionError("a segment's descriptor did not arrive; too many open files? (see ulimit -n)")
            if not count:
                raise EOFError
            self._end += count

    def _acknowledge(self, number: int) -> None:
        try:
            _set_timeout(self._socket, None)
            self._socket.sendall(_ACK.pack(number))
        except ConnectionError:
            return  # the sender is gone; what it had sent is still good, and the next recv will say so

    def close(self) -> None:
        """Free segments and descriptors."""
        for segment in self._segments.values():
            segment.close()
        self._segments.clear()
        while self._fds:
            os.close(self._fds.popleft())


def _set_timeout(end: socket.socket, deadline: Deadline) -> None:
    """Let the next call on this socket wait until `deadline`."""
    if deadline is None:
        if end.gettimeout() is not None:
            end.settimeout(None)
        return
    left = deadline - time.monotonic()
    end.settimeout(left if left > 1e-4 else 0.0)  # 0: take what is there; a tiny timeout would not even look


def _body_offset(header: int) -> int:
    return -(-header // tree.ALIGN) * tree.ALIGN


def _joined(leaves: Leaves, starts: list[int], size: int) -> list[bytes]:
    """The arrays' bytes with the gaps that `tree.layout` leaves between them."""
    out, end = [], 0
    for leaf, start in zip(leaves, starts, strict=True):
        if start > end:
            out.append(bytes(start - end))
        out.append(leaf.tobytes())
        end = start + leaf.nbytes
    assert end == size
    return out
