"""process_vm_readv(2) of a child of our own: may one process read another's memory here?"""

from __future__ import annotations

import ctypes
import os

from pd.doctor.answers import Cma

WORD = b"one process reads another"


class Iovec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("len", ctypes.c_size_t))


def answer() -> Cma:
    """The child sleeps on a pipe while it is read; a fork has the parent's addresses."""
    theirs, ours = ctypes.create_string_buffer(WORD), ctypes.create_string_buffer(len(WORD))
    wait, release = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(release)
        os.read(wait, 1)
        os._exit(0)
    error = _read(child, theirs, ours)
    os.close(release)
    os.close(wait)
    os.waitpid(child, 0)
    return Cma(works=not error and ours.raw == WORD, error=error)


def _read(pid: int, theirs: ctypes.Array[ctypes.c_char], ours: ctypes.Array[ctypes.c_char]) -> str:
    libc = ctypes.CDLL(None, use_errno=True)
    remote = Iovec(ctypes.addressof(theirs), len(WORD))
    local = Iovec(ctypes.addressof(ours), len(WORD))
    libc.process_vm_readv.argtypes = [
        ctypes.c_int,
        ctypes.POINTER(Iovec),
        ctypes.c_ulong,
        ctypes.POINTER(Iovec),
        ctypes.c_ulong,
        ctypes.c_ulong,
    ]
    got = libc.process_vm_readv(pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
    return "" if got == len(WORD) else os.strerror(ctypes.get_errno())
