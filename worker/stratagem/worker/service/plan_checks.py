"""Range checks of a plan's fields, made before a session is made for it.

Plans of our coordinator pass. Others are refused with the name of the wrong field, before the torch
thread fails over it or memory fills up.
"""

from typing import Final

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.numerics.rules import check_numerics
from stratagem.common.privacy.noise import SECRET_BYTES
from stratagem.common.schema.document import MAX_COUNT
from stratagem.common.strategy.strategies import MAX_CLIENTS, MAX_REPLICAS
from stratagem.v1 import worker_pb2 as pb

MAX_MEMBERS: Final = 16_384
MAX_SPLITS: Final = 64
MAX_NAME_CHARS: Final = 4096


def check_plan(request: pb.ExecuteRequest) -> None:
    """Raise InvalidInputError at the first field that is out of its range."""
    _within("segment", request.segment, 0, MAX_COUNT)
    check_numerics(request.numerics)
    match request.WhichOneof("plan"):
        case "train":
            _check_train(request.train)
        case "client_round":
            plan = request.client_round
            _within("client_round.num_clients", plan.num_clients, 1, MAX_CLIENTS)
            _within("client_round.client", plan.client, 0, plan.num_clients - 1)
            _within("client_round.local_epochs", plan.local_epochs, 1, MAX_CLIENTS)
            _check_rows(plan.rows)
        case "evaluate":
            size = max(request.evaluate.size, 1)
            _within("evaluate.size", size, 1, MAX_MEMBERS)
            _within("evaluate.rank", request.evaluate.rank, 0, size - 1)
            _within("evaluate.splits", len(request.evaluate.splits), 0, MAX_SPLITS)
        case "measure":
            _within("measure.splits", len(request.measure.splits), 0, MAX_SPLITS)
        case "show":
            _within("show.step", request.show.step, 0, MAX_COUNT)
        case None:
            raise InvalidInputError.at("plan", "is missing")


def _check_rows(rows: pb.RowPrivacy) -> None:
    _within("client_round.rows.name", len(rows.name), 0, MAX_NAME_CHARS)
    _within("client_round.rows.num_rounds", rows.num_rounds, 0, MAX_CLIENTS)
    if rows.secret and len(rows.secret) != SECRET_BYTES:
        text = f"has {len(rows.secret)} bytes and must have {SECRET_BYTES}"
        raise InvalidInputError.at("client_round.rows.secret", text)


def _check_train(plan: pb.TrainPlan) -> None:
    num_members = len(plan.view.members)
    _within("train.view.members", num_members, 1, MAX_MEMBERS)
    _within("train.view.rank", plan.view.rank, 0, num_members - 1)
    _within("train.to_step", plan.to_step, 0, MAX_COUNT)
    _within("train.base.step", plan.base.step, 0, MAX_COUNT)
    _within("train.num_shards", plan.num_shards, 1, MAX_REPLICAS)
    _within("train.evaluate_splits", len(plan.evaluate_splits), 0, MAX_SPLITS)
    _within("train.ranks", len(plan.ranks), 0, MAX_MEMBERS)
    if plan.exchange not in pb.ExchangeMethod.values():
        names = ", ".join(pb.ExchangeMethod.keys())
        raise InvalidInputError.at("train.exchange", f"{plan.exchange} is not one of {names}")
    for index, member in enumerate(plan.view.members):
        stop = member.first_shard + member.num_shards
        _within(f"train.view.members[{index}].num_shards", stop, 0, plan.num_shards)
    for index, rank in enumerate(plan.ranks):
        _within(f"train.ranks[{index}]", rank, 0, num_members - 1)


def _within(field: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise InvalidInputError.at(field, f"{value} is not in [{least}, {most}]")
