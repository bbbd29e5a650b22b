"""The C library's memory allocator, set for messages of megabytes."""

from __future__ import annotations

import ctypes

# Numbers of glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8

_SETTINGS = ((_M_ARENA_MAX, 1), (_M_MMAP_THRESHOLD, 32 << 20), (_M_TRIM_THRESHOLD, 1 << 30))


def tune_malloc() -> bool:
    """Let freed memory of messages be used again, instead of going back to the system.

    Otherwise each message of some MiB is new memory, which costs a page fault per 4 KiB: more
    than its copy. The setting holds for the whole process, which keeps up to 1 GiB of what it has
    freed; so only those who own the process should choose it, before they start threads.

    Returns:
        Whether the C library knows the settings; others than glibc do not.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(mallopt(*setting) for setting in _SETTINGS)
