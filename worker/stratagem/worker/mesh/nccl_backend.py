"""The nccl engine: CUDA devices, one per member.

nccl has no tags. Two members' transfers run in the order of issue on a communicator of the pair,
so both ends must issue them in mirrored order; the reducer does when `in_order` is set.
"""

from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from stratagem.worker.mesh.link import ExchangeError
from stratagem.worker.mesh.process_group_link import ProcessGroupLink


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


class NcclLink(ProcessGroupLink):
    """A `Link` over one process group, which matches transfers by order and not by their tags."""

    name = "nccl"
    in_order = True

    def cut(self) -> None:
        if self._group is not None:
            self._group.abort()

    def close(self) -> None:
        self._group = None
