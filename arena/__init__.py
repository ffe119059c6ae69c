"""Python owners live exactly as long as the CUDA graph that captured their pointers.

`retain` is the one call of the hot path; `collect` and `suspend` are scopes that note what is retained; `reclaim` and
`stats` tell and speed up what happens afterwards; `audit`, `report` and `owner_of` show what graphs hold. Any thread may call
any of them. Importing this loads neither torch nor a CUDA driver.
"""

import os

from arena._registry import CaptureError, DriverError, Stats, capture_id, collect, reclaim, retain, stats, suspend

TYPE_CHECKING = False  # as of typing, which takes longer to import than all of this
if TYPE_CHECKING:
    from arena.auditing import Audit, AuditError, AuditWarning, audit
    from arena.reporting import Report, owner_of, report

__version__ = "0.1.0"


def get_include() -> str:
    """The folder of arena.h, for the compiler's search path: `-I`, or `include_dirs` of an extension."""
    return os.path.join(os.path.dirname(__file__), "include")


__all__ = [
    "Audit",
    "AuditError",
    "AuditWarning",
    "CaptureError",
    "DriverError",
    "Report",
    "Stats",
    "audit",
    "capture_id",
    "collect",
    "get_include",
    "owner_of",
    "reclaim",
    "report",
    "retain",
    "stats",
    "suspend",
]

_LATER = dict.fromkeys(("Audit", "AuditError", "AuditWarning", "audit"), "auditing")
_LATER |= dict.fromkeys(("Report", "owner_of", "report"), "reporting")


def __getattr__(name: str) -> object:
    """What shows is loaded when it is first asked for."""
    if name not in _LATER:
        raise AttributeError(f"module 'arena' has no attribute {name!r}")
    import importlib

    value = globals()[name] = getattr(importlib.import_module(f"arena.{_LATER[name]}"), name)
    return value
