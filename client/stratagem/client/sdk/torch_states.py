"""Converts states to tensors, and tensors to inline data: the parts of the client that need torch.

Imported only when a caller asks for tensors or passes some in.
"""

from collections.abc import Mapping
from typing import Any

import torch

from stratagem.client.sdk.downloads import pull_state
from stratagem.client.sdk.plain_model import MODEL_PREFIX
from stratagem.client.sdk.retrying_calls import Connection
from stratagem.common.base.ids import RunId
from stratagem.common.tensors.chunks import Sink
from stratagem.common.tensors.manifest import Manifest, Purpose
from stratagem.common.tensors.torch_codec import allocate, manifest_of


async def to_state_dict(
    connection: Connection, run_id: RunId, which: str
) -> dict[str, torch.Tensor]:
    """Parameters and buffers under the model's own names; the optimizer's state is left out."""
    tensors: dict[str, torch.Tensor] = {}

    def accept(manifest: Manifest) -> Sink:
        sink, finish = allocate(manifest)
        tensors.update(finish())  # filled through the sink
        return sink

    await pull_state(connection, run_id, which, accept)
    return {
        name.removeprefix(MODEL_PREFIX): tensor
        for name, tensor in tensors.items()
        if name.startswith(MODEL_PREFIX)
    }


def pack_tensors(named: Mapping[str, Any]) -> tuple[Manifest, list[memoryview]]:
    """Tensors and arrays as a manifest and their bytes."""
    tensors = {name: torch.as_tensor(value) for name, value in named.items()}
    return manifest_of(tensors, Purpose.DATA)
