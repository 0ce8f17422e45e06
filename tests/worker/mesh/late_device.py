"""Stands in for a device whose copies to the host take their time."""

import threading
from functools import partial

import torch
from torch import Tensor

from stratagem.worker.mesh.staging import HostCopy


class LateDevice:
    """Its copies hold NaN until they are waited for, in whatever thread that is."""

    def __init__(self) -> None:
        self.num_begun = 0
        self.waited_in: set[int] = set()

    def to_host(self, tensor: Tensor) -> HostCopy:
        self.num_begun += 1
        host = torch.full_like(tensor, torch.nan)
        return HostCopy(host, _LateEvent(self, partial(host.copy_, tensor.detach())))


class _LateEvent:
    def __init__(self, device: LateDevice, end: "partial[Tensor]") -> None:
        self._device, self._end = device, end
        self._has_ended = False

    def query(self) -> bool:
        return self._has_ended

    def synchronize(self) -> None:
        self._end()
        self._has_ended = True
        self._device.waited_in.add(threading.get_ident())
