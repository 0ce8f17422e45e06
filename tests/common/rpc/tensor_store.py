"""A store that streams tensors, and a download of them."""

from __future__ import annotations

from typing import Any

import torch

from stratagem.common.rpc.channel import open_channel
from stratagem.common.rpc.tensor_transfer import Retry, pull
from stratagem.common.tensors.manifest import Manifest, Purpose
from stratagem.common.tensors.torch_codec import allocate, manifest_of
from stratagem.v1 import worker_pb2
from tests.common.rpc.rig import Store, stub_of

EAGER = Retry(max_attempts=3, first_pause_s=0.001, max_pause_s=0.01)


def filled(store: Store, named: dict[str, torch.Tensor]) -> Store:
    store.manifest, store.buffers = manifest_of(named, Purpose.STATE)
    return store


class Download:
    """Receives into fresh tensors; `accepted` counts the manifests it was shown."""

    def __init__(self) -> None:
        self.accepted = 0

    def accept(self, manifest: Manifest) -> Any:
        self.accepted += 1
        sink, self.finish = allocate(manifest)
        return sink


async def download(port: int, **options: Any) -> tuple[dict[str, torch.Tensor], Download]:
    target = Download()
    async with open_channel(f"127.0.0.1:{port}", own_connection=True) as channel:
        stub = stub_of(channel)
        await pull(
            lambda offset: stub.GetState(worker_pb2.GetStateRequest(offset=offset)),
            target.accept,
            **{"retry": EAGER, **options},
        )
    return target.finish(), target
