"""A federated client's update, coded: what moved, relative to the global state.

On the wire it is one payload of all coded parameters, in order of name, and with it every other
tensor as it is. Clients keep nothing from round to round, so there is no residual.
"""

from collections.abc import Iterable
from typing import Final

from stratagem.common.compression.codec import Codec, TensorLayout
from stratagem.common.compression.codec_table import make_codec
from stratagem.common.job import JobSpec
from stratagem.common.numerics.counter_random import derive
from stratagem.common.tensors.manifest import TensorSpec

PAYLOAD: Final = "payload"
"""The name of the payload among the tensors; those of a model have names with a slash."""


def update_codec(
    job: JobSpec, coded: Iterable[TensorSpec], numerics: int
) -> tuple[Codec, list[str]]:
    """The codec of these tensors, and their names in the order in which it takes them."""
    assert job.compression is not None
    layout = sorted(
        (TensorLayout(tensor.name, tensor.shape) for tensor in coded), key=lambda e: e.name
    )
    codec = make_codec(job.compression, layout, job.seed, with_feedback=False, numerics=numerics)
    return codec, [tensor.name for tensor in layout]


def update_key(job: JobSpec, round_num: int, client: int) -> int:
    """Return the key of an update: another one for each update, the same when a round is trained
    again."""
    assert job.compression is not None
    seed = job.seed if job.compression.seed is None else job.compression.seed
    return derive(seed, round_num, client)
