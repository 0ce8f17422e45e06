"""How long tests wait for what happens at once."""

from collections.abc import Iterator

PATIENCE_S = 180.0
"""Ends only what hangs: a busy machine stands still for seconds. No test may measure by it."""

AT_ONCE_S = 60.0
"""What waits for nothing takes less on any machine; deadlines it must not wait for are longer."""


def growing(first_s: float) -> Iterator[float]:
    """Deadlines to try one after the other, where one must pass and something must be done before.

    The first is enough on a quiet machine. A test goes on to the next only when the work before the
    deadline was not done in time, and fails when it was never.
    """
    yield from (first_s * 4**power for power in range(4))
