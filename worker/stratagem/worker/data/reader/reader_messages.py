"""What a worker and its readers say to each other: JSON texts, one to a line.

A worker sends a setup, then orders; a reader answers each with a batch or an error, in order, and
tells what the user's code has printed meanwhile. Must not know sockets.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stratagem.common.base.errors import (
    InvalidInputError,
    StratagemError,
    UserCodeError,
    Violation,
)
from stratagem.worker.data.data_factory import DataFunction
from stratagem.worker.data.row_datasets import BatchKeys, ReadOrder
from stratagem.worker.user_code.entrypoints import EntryPoints


@dataclass(frozen=True, slots=True)
class ReaderSetup:
    """What a reader makes its data set of: the same as its worker."""

    function: DataFunction
    seed: int
    entrypoints: EntryPoints

    def text(self, sys_path: Sequence[str]) -> str:
        """Returns the setup as the first line. sys_path: where the worker imports from."""
        return json.dumps(
            {
                "sys_path": list(sys_path),
                "allow": list(self.entrypoints.allow),
                "import_paths": list(map(str, self.entrypoints.import_paths)),
                "code": self.entrypoints.code,
                "entrypoint": self.function.entrypoint,
                "kwargs": self.function.kwargs,
                "collate": self.function.collate,
                "seed": self.seed,
            }
        )


def setup_of(message: Mapping[str, Any]) -> ReaderSetup:
    """Returns the setup of the first line."""
    entrypoints = EntryPoints(message["allow"], message["import_paths"], message["code"])
    function = DataFunction(message["entrypoint"], message["kwargs"], message["collate"])
    return ReaderSetup(function, message["seed"], entrypoints)


def order_text(ticket: int, order: ReadOrder, freed: Sequence[int]) -> str:
    """Returns an order as a line. freed: segments that may be written again."""
    return json.dumps(
        {
            "ticket": ticket,
            "split": order.split,
            "num_rows": order.num_rows,
            "given": order.given,
            "numbers": order.numbers,
            "row_key": order.keys.rows,
            "batch_key": order.keys.batch,
            "freed": freed,
        }
    )


def order_of(message: Mapping[str, Any]) -> ReadOrder:
    """Returns the order of a line."""
    return ReadOrder(
        message["split"],
        message["num_rows"],
        tuple((name, value) for name, value in message["given"]),
        tuple(message["numbers"]),
        BatchKeys(tuple(message["row_key"]), tuple(message["batch_key"])),
    )


def error_text(ticket: int, error: StratagemError) -> str:
    """Returns the answer of an order that cannot be carried out."""
    told: dict[str, Any] = {"ticket": ticket}
    match error:
        case InvalidInputError(violations=violations) if violations:
            told["invalid"] = [[each.field, each.message] for each in violations]
        case UserCodeError():
            told["failed"] = [error.type, error.message, error.traceback, error.activity]
        case _:
            told["failed"] = [type(error).__name__, str(error), "", ""]
    return json.dumps(told)


def error_of(message: Mapping[str, Any]) -> StratagemError | None:
    """Returns the error that an answer tells, if it does."""
    if "invalid" in message:
        return InvalidInputError(violations=[Violation(*each) for each in message["invalid"]])
    if "failed" in message:
        kind, text, traceback, activity = message["failed"]
        return UserCodeError(kind, text, traceback, activity=activity)
    return None
