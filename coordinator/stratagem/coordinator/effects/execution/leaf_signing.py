"""Answers a worker that asks, inside a call, for signed requests about the leaves of one state."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final

from stratagem.common.base.errors import LimitError
from stratagem.common.base.ids import Digest
from stratagem.common.rpc.channel import write_message
from stratagem.v1 import worker_pb2

MAX_ASKED: Final = 64
"""Leaves in one message."""
MAX_SIGNED: Final = 16
"""Requests for one leaf: the first, and others when it was refused or its time was over."""

Sign = Callable[[Sequence[Digest]], Sequence[str]]
"""Makes a URL for each leaf; blocks."""


class LeafSigning:
    """The signed requests of one call, within limits."""

    def __init__(self, call: Any, make: Callable[..., Any], sign: Sign) -> None:
        """make: the message of the call that has them in its field `signed`."""
        self._call, self._make, self._sign = call, make, sign
        self._signed: Counter[int] = Counter()

    async def answer(self, numbers: Sequence[int], leaves: Sequence[Digest]) -> None:
        """Send a signed request for each leaf that is asked for, given with its number, which the
        caller has checked. Raises LimitError for too many."""
        self._signed.update(numbers)
        if len(numbers) > MAX_ASKED or any(self._signed[each] > MAX_SIGNED for each in numbers):
            text = f"at most {MAX_ASKED} leaves in a message, and each {MAX_SIGNED} times"
            raise LimitError(f"asked.leaves: {text}")
        urls = await asyncio.to_thread(self._sign, leaves)
        pairs = zip(numbers, urls, strict=True)
        requests = [worker_pb2.SignedRequest(number=number, url=url) for number, url in pairs]
        signed = worker_pb2.SignedRequests(requests=requests)
        await write_message(self._call, self._make(signed=signed))
