"""What the links over one of torch's process groups have in common: transfers, their bytes, and the
errors of the group. Knows no engine."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from stratagem.common.tensors.stream import RECEIVED, SENT, Flow, over
from stratagem.worker.mesh.link import ExchangeError


class ProcessGroupLink:
    """Base of such links: starts the transfers of a `CollectiveLink`."""

    name = ""

    def __init__(self, rank: int, size: int, group: Any) -> None:
        """group: of the engine's class, which takes lists of tensors."""
        self.rank, self.size = rank, size
        self._group: Any = group
        self._sent, self._received = over(self.name, SENT), over(self.name, RECEIVED)

    def send(self, peer: int, tag: int, tensor: Tensor) -> GroupTransfer:
        what = f"send to member {peer}"
        return self._begin(what, tensor, self._sent, lambda group: group.send([tensor], peer, tag))

    def recv(self, peer: int, tag: int, tensor: Tensor) -> GroupTransfer:
        what = f"receive from member {peer}"
        flow = self._received
        return self._begin(what, tensor, flow, lambda group: group.recv([tensor], peer, tag))

    def all_reduce(self, tensor: Tensor) -> GroupTransfer:
        what = "all-reduce among all members"
        return self._begin(what, tensor, self._sent, lambda group: group.allreduce([tensor]))

    def failed(self, what: str, error: RuntimeError) -> ExchangeError:
        """Returns the error of a transfer for one of the group's."""
        return ExchangeError(f"{what}: {error}")

    def count(self, num_bytes: int) -> None:
        """Takes note of bytes that are under way from now on; negative: that were waited for."""

    def _begin(
        self, what: str, tensor: Tensor, flow: Flow, start: Callable[[Any], dist.Work]
    ) -> GroupTransfer:
        if self._group is None:
            raise ExchangeError("the link is closed")
        try:
            work = start(self._group)
        except RuntimeError as error:
            raise self.failed(what, error) from None
        flow.num_bytes += tensor.nbytes
        self.count(tensor.nbytes)
        return GroupTransfer(self, work, what, tensor.nbytes)


class GroupTransfer:
    """One transfer. `what` says which, for the error."""

    __slots__ = ("_link", "_size_bytes", "_what", "_work")

    def __init__(self, link: ProcessGroupLink, work: dist.Work, what: str, size_bytes: int) -> None:
        self._link, self._work, self._what, self._size_bytes = link, work, what, size_bytes

    def wait(self, timeout_s: float) -> None:
        try:
            self._work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise self._link.failed(self._what, error) from None
        self._link.count(-self._size_bytes)
