"""A client's update as its coded difference to the global state; see common.compression.update."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from stratagem.common.compression import FloatArray, NonFiniteError
from stratagem.common.compression.table import PAYLOAD, update_codec, update_key
from stratagem.common.job import JobSpec
from stratagem.common.numerics.rules import CURRENT
from stratagem.common.tensors.manifest import Purpose
from stratagem.common.tensors.torch_codec import manifest_of
from stratagem.worker.engine.trainers.federated_client import ClientRound
from stratagem.worker.mesh.device_staging import to_host
from stratagem.worker.session.session_states import Frozen


def coded_update(
    job: JobSpec,
    done: ClientRound,
    base: Mapping[str, Tensor],
    round_num: int,
    client: int,
    numerics: int = CURRENT,
) -> tuple[Frozen, dict[str, int]] | None:
    """Return the update for the wire, and what that saves (see TrainResult.traffic).

    None where it is not finite: it is then sent as it is, so that the coordinator rejects it as it
    rejects any.
    """
    assert job.compression is not None
    whole, _ = manifest_of(done.tensors, Purpose.UPDATE)
    coded = [
        spec for spec in whole.stored() if spec.name in done.trained and spec.dtype == "float32"
    ]
    codec, names = update_codec(job, coded, numerics)
    trained, before = _flats(done.tensors, names), _flats(base, names)
    moves = [x - y for x, y in zip(trained, before, strict=True)]
    try:
        payload, _ = codec.encode(moves, codec.initial_state(), update_key(job, round_num, client))
    except NonFiniteError:
        return None
    others = {spec.name: done.tensors[spec.name] for spec in whole.stored()}
    for name in names:
        del others[name]
    others[PAYLOAD] = torch.from_numpy(payload)
    manifest, buffers = manifest_of(
        {name: tensor.detach().cpu().contiguous() for name, tensor in others.items()},
        Purpose.UPDATE,
        weight=float(done.num_samples),
        metadata={"round": str(round_num), "client": str(client)},
    )
    traffic = {"sent_bytes": manifest.total_bytes, "uncompressed_bytes": whole.total_bytes}
    return Frozen(replace(manifest, codec=job.compression.codec), buffers), traffic


def _flats(tensors: Mapping[str, Tensor], names: Sequence[str]) -> list[FloatArray]:
    copies = [to_host(tensors[name].detach().reshape(-1)) for name in names]
    return [copy.wait().numpy() for copy in copies]  # all were under way before one is read
