"""What a cancellation becomes that meets a failure.

A TaskGroup of Python before 3.13 that is cancelled while one of its tasks fails raises the failure
alone. Whoever catches failures in order to go on must ask here whether it should.
"""

import asyncio


def stop_if_cancelled() -> None:
    """Raises CancelledError when somebody has asked the present task to end."""
    task = asyncio.current_task()
    if task is not None and task.cancelling() > 0:
        raise asyncio.CancelledError
