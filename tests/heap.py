"""How much memory the process has from `malloc`: what tests and their bounds on it ask. Python's own small objects are not in
it, since they live in areas that Python maps for itself."""

import ctypes

import pytest


class Mallinfo(ctypes.Structure):
    """What glibc's mallinfo2() returns."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",  # bytes in blocks that are mapped one by one
            "usmblks",
            "fsmblks",
            "uordblks",  # bytes in blocks of the heap
            "fordblks",
            "keepcost",
        )
    ]


def heap_bytes():
    """Bytes in use now, of all threads."""
    try:
        ask = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        pytest.skip("this libc has no mallinfo2")
    ask.restype = Mallinfo
    now = ask()
    return now.uordblks + now.hblkhd
