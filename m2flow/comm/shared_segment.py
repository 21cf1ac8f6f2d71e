"""Anonymous shared memory, and a pool of it.

A segment is a file without a name: `memfd_create`, or a temporary file that is unlinked at once where the system has
no memfd. It lives as long as a process holds it, so a killed process leaves nothing behind, in /dev/shm or elsewhere.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
from collections import deque

SMALLEST = 1 << 20  # bytes; segments are this or a larger power of two, so that sizes that vary a little share one
HUGE = 1 << 21


class SharedSegment:
    """`size` bytes of shared memory, mapped here. `fd` is what the other process maps; once it has, it is `known`."""

    def __init__(self, fd: int, size: int) -> None:
        self.fd, self.size, self.known = fd, size, False
        self.map = mmap.mmap(fd, size)
        if size >= HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a hint for speed only; a kernel without huge pages refuses it
                self.map.madvise(mmap.MADV_HUGEPAGE)

    @classmethod
    def create(cls, least: int) -> SharedSegment:
        """A new segment of at least this many bytes."""
        size = max(SMALLEST, 1 << (least - 1).bit_length())
        fd = anonymous_file()
        os.ftruncate(fd, size)
        return cls(fd, size)

    def introduced(self) -> None:
        """The other process has its descriptor, so ours is not needed any more."""
        if not self.known:
            self.known = True
            os.close(self.fd)

    def close(self) -> None:
        """Unmap. The memory is freed when the other process has done so too."""
        with contextlib.suppress(BufferError):  # a caught exception may still look at it; then it ends with that
            self.map.close()
        self.introduced()


def anonymous_file(name: str = "m2flow") -> int:
    """Descriptor of an empty file in memory; `name` is only for who looks into /proc."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, os.MFD_CLOEXEC)
    fd, path = tempfile.mkstemp(prefix=f"{name}-")
    os.unlink(path)  # noqa: PTH108  from here on it has no name
    return fd


class Pool:
    """The sender's segments: free ones are used again once the receiver has acknowledged what was in them."""

    def __init__(self) -> None:
        self.free: dict[int, SharedSegment] = {}
        self.busy: dict[int, SharedSegment] = {}
        self.dropped: deque[int] = deque()  # numbers that the receiver must still be told to forget
        self._next = 1

    def take(self, size: int) -> tuple[int, SharedSegment]:
        """The smallest free segment that is large enough; else a new one, in place of the smallest free one."""
        fitting = [(segment.size, number) for number, segment in self.free.items() if segment.size >= size]
        if fitting:
            number = min(fitting)[1]
            self.busy[number] = segment = self.free.pop(number)
            return number, segment
        if self.free:
            _, smallest = min((segment.size, number) for number, segment in self.free.items())
            if self.free[smallest].known:
                self.dropped.append(smallest)
            self.free.pop(smallest).close()
        number, self._next = self._next, self._next + 1
        self.busy[number] = segment = SharedSegment.create(size)
        return number, segment

    def give_back(self, number: int) -> None:
        """It is free again: the receiver has copied out what was in it, or it was never sent."""
        self.free[number] = self.busy.pop(number)

    def close(self) -> None:
        """Free everything."""
        for segment in (*self.free.values(), *self.busy.values()):
            segment.close()
        self.free.clear()
        self.busy.clear()
