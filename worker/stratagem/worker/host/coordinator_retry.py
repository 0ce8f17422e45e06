"""The pauses between a worker's attempts to reach its coordinator."""

from typing import Final

from stratagem.common.base.retry import Backoff

FIRST_RETRY_S: Final = 0.1
LAST_RETRY_S: Final = 5.0


def new_backoff() -> Backoff:
    """Make the backoff between attempts to reach a coordinator."""
    return Backoff(FIRST_RETRY_S, LAST_RETRY_S)
