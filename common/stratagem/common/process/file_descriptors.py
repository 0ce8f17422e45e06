"""Raise the limit on the files and connections that this process may have open at once."""

from typing import Final

import structlog

ENOUGH: Final = 256
"""The number of files and connections that a process needs in all; with a lower limit it warns."""
_WANTED: Final = 65_536

log = structlog.get_logger()


def raise_descriptor_limit() -> int:
    """Raise the soft limit on open files to the hard one, and return it; 0 on systems without one.

    The usual soft limit of 1,024 is meant for programs that call select(), and is too low for a
    coordinator of 1,000 workers. A process at its limit refuses connections, and retries writes
    later.
    """
    try:
        import resource
    except ImportError:  # not a POSIX system
        return 0
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _WANTED if hard == resource.RLIM_INFINITY else min(hard, _WANTED)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        soft = limit
    if soft != resource.RLIM_INFINITY and soft < ENOUGH:
        log.warning("few descriptors: raise the hard limit of open files", limit=soft)
    return soft
