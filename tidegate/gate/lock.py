"""Open-file-description locks on single bytes of a file.

Like flock they belong to the open file: every process that inherits or is passed the descriptor holds them, and they
end when the last copy of it is closed, by a crash too. Unlike flock they cover a byte range, so that one file carries
several locks, and they can be looked at without being taken (F_OFD_GETLK): no probe ever makes another's attempt fail.
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
    """Whether an open file other than `fd`'s holds the byte; takes nothing."""
    answer = fcntl.fcntl(fd, _GETLK, _request(fcntl.F_WRLCK, byte))
    (kind, *_) = _FLOCK.unpack(answer)
    return bool(kind != fcntl.F_UNLCK)


def _request(kind: int, byte: int) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0)
