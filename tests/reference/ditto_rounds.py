"""Ditto as its paper says it: beside the global rounds, each client trains a model of its own."""

from functools import partial
from typing import Any

from torch import Tensor

from stratagem.common.job import JobSpec
from stratagem.common.job.derived import with_fields
from stratagem.common.schema.json import JSON
from stratagem.worker.user_code.entrypoints import EntryPoints
from tests.reference.loops import Prepared, Result, federated_loop, train_one_client, trained_of


def ditto_rounds(
    job: JobSpec, entrypoints: EntryPoints, strength: float
) -> tuple[Result, dict[int, dict[str, Tensor]]]:
    """The global model after the last round, and each client's own.

    job: without Ditto. Each step of a client's own model v is one of FedProx toward the global w
    that the round began with.
    """
    prox: JSON = {"method": "FedProx", "mu": strength}
    near = with_fields(job, {"strategy.aggregation": prox})
    own: dict[int, dict[str, Tensor]] = {}

    def train(job: JobSpec, entry: EntryPoints, prepared: Prepared, *rest: Any) -> Any:
        model, client = prepared[0], rest[0]
        base = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        anchors = [param.detach().clone() for _, param in trained_of(model)]
        done = train_one_client(job, entry, prepared, *rest)
        update = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        model.load_state_dict(own.get(client, base))
        near_it = partial(train_one_client, anchors=anchors)
        near_it(near, entry, prepared, *rest)
        own[client] = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        model.load_state_dict(update)
        return done

    return federated_loop(job, entrypoints, train_client=train), own
