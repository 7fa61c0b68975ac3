"""Open-file-description locks on single bytes of a file.

A lock belongs to the open file, like flock: every process that inherits or receives the descriptor holds it. It ends
when the last copy of the descriptor is closed, by a crash too. Unlike flock, a lock covers a range of bytes, so one
file carries several locks. A probe (F_OFD_GETLK) takes no lock, so no probe ever makes another attempt fail.
"""

from __future__ import annotations

import fcntl
import os
import struct

_FLOCK = struct.Struct("hhqqi4x")
"""struct flock of 64-bit Linux: l_type, l_whence, l_start, l_len, l_pid."""
_GETLK, _SETLK, _SETLKW = fcntl.F_OFD_GETLK, fcntl.F_OFD_SETLK, fcntl.F_OFD_SETLKW


def try_lock(fd: int, byte: int) -> bool:
    """Whether the byte is now locked by `fd`'s open file; never waits."""
    try:
        fcntl.fcntl(fd, _SETLK, _request(fcntl.F_WRLCK, byte))
    except BlockingIOError:
        return False
    return True


def lock(fd: int, byte: int) -> None:
    """Waits until the byte is locked by `fd`'s open file."""
    fcntl.fcntl(fd, _SETLKW, _request(fcntl.F_WRLCK, byte))


def unlock(fd: int, byte: int) -> None:
    fcntl.fcntl(fd, _SETLK, _request(fcntl.F_UNLCK, byte))


def is_locked_by_another(fd: int, byte: int) -> bool:
    """Whether an open file other than `fd`'s holds the byte. Takes no lock."""
    answer = fcntl.fcntl(fd, _GETLK, _request(fcntl.F_WRLCK, byte))
    (kind, *_) = _FLOCK.unpack(answer)
    return bool(kind != fcntl.F_UNLCK)


def _request(kind: int, byte: int) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0)
