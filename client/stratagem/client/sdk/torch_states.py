"""Convert states to tensors, and tensors to inline data: the parts of the client that need torch.

This module is imported only if a caller asks for tensors or passes some.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from stratagem.client.sdk.connection import Connection
from stratagem.client.sdk.downloads import pull_state
from stratagem.client.sdk.model_files import AVERAGE, MODEL_PREFIX, means_of
from stratagem.common.base.ids import RunId
from stratagem.common.tensors.manifest import Manifest, Purpose
from stratagem.common.tensors.stream import Sink
from stratagem.common.tensors.torch_codec import allocate, element_type, manifest_of, torch_dtype


async def to_state_dict(
    connection: Connection, run_id: RunId, which: str
) -> dict[str, torch.Tensor]:
    """Download a state and return the model's state_dict, without the optimizer's state."""
    tensors: dict[str, torch.Tensor] = {}
    means: dict[str, str] = {}

    def accept(manifest: Manifest) -> Sink:
        means.update(means_of(manifest) if which == AVERAGE else {})
        sink, finish = allocate(manifest)
        tensors.update(finish())  # filled through the sink
        return sink

    await pull_state(connection, run_id, which, accept)
    return {
        name.removeprefix(MODEL_PREFIX): tensors[means.get(name, name)]
        for name in tensors
        if name.startswith(MODEL_PREFIX)
    }


def pack_tensors(named: Mapping[str, Any]) -> tuple[Manifest, list[memoryview]]:
    """Return the manifest and the bytes of tensors, or of arrays in native byte order."""
    tensors = {
        name: value if isinstance(value, torch.Tensor) else _tensor(value)
        for name, value in named.items()
    }
    for name, tensor in tensors.items():
        element_type(f"data.{name}", tensor)
    return manifest_of(tensors, Purpose.DATA)


def _tensor(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """Convert an array to a tensor by its type's name, as torch.from_numpy lacks some types."""
    flat = torch.from_numpy(array.reshape(-1).view(np.uint8))
    return flat.view(torch_dtype(array.dtype.name)).reshape(array.shape)
