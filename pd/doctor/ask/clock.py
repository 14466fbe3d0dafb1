"""adjtimex(2) with modes 0: reads the kernel's clock state, sets nothing."""

from __future__ import annotations

import ctypes

from pd.doctor.answers import Clock

STA_UNSYNC = 0x0040
TIME_ERROR = 5


class Timex(ctypes.Structure):
    """Head of struct timex, <sys/timex.h>, 64-bit; the kernel fills the rest, which is padding here."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),  # µs
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_long * 32),
    )


def answer() -> Clock:
    """Raises OSError where the call is filtered."""
    libc = ctypes.CDLL(None, use_errno=True)
    state = Timex()
    code = libc.adjtimex(ctypes.byref(state))
    if code < 0:
        raise OSError(ctypes.get_errno(), "adjtimex")
    return Clock(synchronized=code != TIME_ERROR and not state.status & STA_UNSYNC, max_error_s=state.maxerror / 1e6)
