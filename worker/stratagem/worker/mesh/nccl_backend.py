"""The nccl engine: CUDA devices, one per member.

nccl has no tags. Two members' transfers run in the order of issue on a communicator of the pair,
so both ends must issue them in mirrored order; the reducer does when `in_order` is set.
"""

from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from stratagem.common.tensors.traffic import RECEIVED, SENT, over
from stratagem.worker.mesh.link import ExchangeError

_SENT, _RECEIVED = over("nccl", SENT), over("nccl", RECEIVED)


def serve_nccl(host: str, timeout_s: float) -> TCPStore:
    """Serves the store that nccl asks whenever a pair first talks: the first member does, from
    before the rendezvous on and for the life of the group."""
    try:
        return TCPStore(host, 0, is_master=True, timeout=timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise ExchangeError(f"cannot listen on {host}: {error}") from error


def connect_nccl(
    served: TCPStore | None, rank: int, size: int, address: str, timeout_s: float
) -> "NcclLink":
    """Joins the group of `size` members; each must have set its CUDA device. address is the
    first member's store."""
    timeout = timedelta(seconds=timeout_s)
    try:
        name, port = address.rsplit(":", 1)
        store = served or TCPStore(name, int(port), is_master=False, timeout=timeout)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return NcclLink(rank, size, dist.ProcessGroupNCCL(store, rank, size, options))
    except RuntimeError as error:
        raise ExchangeError(f"cannot form a group of {size}: {error}") from error


class NcclLink:
    """A `Link` over one process group."""

    name = "nccl"
    in_order = True

    def __init__(self, rank: int, size: int, group: "dist.ProcessGroupNCCL") -> None:
        self.rank, self.size = rank, size
        self._group: dist.ProcessGroupNCCL | None = group

    def send(self, peer: int, tag: int, tensor: Tensor) -> "NcclWork":
        what = f"send to member {peer}"
        _SENT.num_bytes += tensor.nbytes
        return self._issue(lambda group: group.send([tensor], peer, 0), what)  # type: ignore[attr-defined]

    def recv(self, peer: int, tag: int, tensor: Tensor) -> "NcclWork":
        what = f"receive from member {peer}"
        _RECEIVED.num_bytes += tensor.nbytes
        return self._issue(lambda group: group.recv([tensor], peer, 0), what)  # type: ignore[attr-defined]

    def all_reduce(self, tensor: Tensor) -> "NcclWork":
        what = "all-reduce among all members"
        _SENT.num_bytes += tensor.nbytes
        return self._issue(lambda group: group.allreduce([tensor]), what)  # type: ignore[attr-defined]

    def cut(self) -> None:
        if self._group is not None:
            self._group.abort()

    def close(self) -> None:
        self._group = None

    def _issue(
        self, operation: "Callable[[dist.ProcessGroupNCCL], dist.Work]", what: str
    ) -> "NcclWork":
        if self._group is None:
            raise ExchangeError("the link is closed")
        try:
            return NcclWork(operation(self._group), what)
        except RuntimeError as error:
            raise ExchangeError(f"{what}: {error}") from None


class NcclWork:
    """One transfer. `what` says which, for the error."""

    __slots__ = ("_what", "_work")

    def __init__(self, work: dist.Work, what: str) -> None:
        self._work, self._what = work, what

    def wait(self, timeout_s: float) -> None:
        try:
            self._work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise ExchangeError(f"{self._what}: {error}") from None
