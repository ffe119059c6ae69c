"""Python owners live exactly as long as the CUDA graph that captured their pointers.

`retain` is the one call of the hot path; `collect` and `suspend` are scopes that note what is retained; `reclaim` and
`stats` tell and speed up what happens afterwards. Any thread may call any of them. Importing this loads neither torch nor
a CUDA driver.
"""

import os

from arena._registry import CaptureError, DriverError, Stats, capture_id, collect, reclaim, retain, stats, suspend

__version__ = "0.1.0"


def get_include() -> str:
    """The folder of arena.h, for the compiler's search path: `-I`, or `include_dirs` of an extension."""
    return os.path.join(os.path.dirname(__file__), "include")


__all__ = [
    "CaptureError",
    "DriverError",
    "Stats",
    "capture_id",
    "collect",
    "get_include",
    "reclaim",
    "retain",
    "stats",
    "suspend",
]
