"""Raises the limit on how many files and connections this process may have open at once."""

from typing import Final

import structlog

ENOUGH: Final = 256
"""A process that has not even this many gets a warning: each connection takes one, and so does each
file that is read or written."""
_WANTED: Final = 65_536

log = structlog.get_logger()


def raise_descriptor_limit() -> int:
    """Raise the soft limit as far as the hard one allows, and answer it; 0 where there is none.

    The usual soft limit of 1,024 is there for programs that call select(), and is too few for a
    coordinator of 1,000 workers. A process that runs out refuses connections, and tries again later
    what it could not write.
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
