"""The two places of states in leaves, as tests look into them from outside."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pytest

from stratagem.common.base.ids import Digest
from stratagem.common.tensors.leaves import LeafList, StateFolder, digest_and_upload, read_list
from stratagem.coordinator.store.bucket import open_s3
from tests.coordinator.store.places import BUCKET, environ_of
from tests.coordinator.store.troubled import Troubled, troubled
from tests.worker.pipeline.s3_server import s3_server


class LeafPlaceOutside(Protocol):
    """Where the states of one coordinator are."""

    @property
    def environment(self) -> Mapping[str, str]:
        """What its processes are started with."""

    def uploads(self) -> list[tuple[Digest, str]]:
        """Each leaf that is there, and which upload has written it."""

    def lists(self) -> list[LeafList]:
        """The lists of all states that are there."""

    def has_parts(self) -> bool:
        """Whether there is something that is no whole leaf."""


@dataclass
class InFolder:
    """A folder that the workers see, too."""

    root: Path

    @property
    def environment(self) -> Mapping[str, str]:
        return {
            "STRATAGEM_COORDINATOR_STATE_PATH": "direct",
            "STRATAGEM_WORKER_STATE_FOLDER": str(self.root),
        }

    @property
    def folder(self) -> StateFolder:
        return StateFolder(self.root)

    def uploads(self) -> list[tuple[Digest, str]]:
        return [digest_and_upload(path.name) for path in self.folder.leaves.glob("??/*")]

    def lists(self) -> list[LeafList]:
        paths = self.folder.lists.glob("??/*")
        found = [self.folder.read_list(Digest(path.stem)) for path in paths]
        return [each for each in found if each is not None]

    def has_parts(self) -> bool:
        return bool(list(self.folder.temporary.iterdir()))


@dataclass
class InBucket:
    """A bucket for which workers have no keys, behind a server that refuses as told."""

    server: Troubled
    prefix: str

    @property
    def url(self) -> str:
        return f"s3://{BUCKET}/{self.prefix}"

    @property
    def environment(self) -> Mapping[str, str]:
        return {
            "STRATAGEM_COORDINATOR_STATE_PATH": "direct",
            "STRATAGEM_COORDINATOR_BLOB_STORE": self.url,
            **environ_of(self.server.endpoint),
        }

    def __post_init__(self) -> None:
        self._objects = open_s3(self.url, environ_of(self.server.endpoint))

    def uploads(self) -> list[tuple[Digest, str]]:
        names = [each.name.split("/") for each in self._objects.list("leaves")]
        return [(Digest(digest), name.removesuffix(".leaf")) for _, digest, name in names]

    def lists(self) -> list[LeafList]:
        found = {each.name.split("/")[1]: each for each in self._objects.list("lists")}
        return [read_list(b"".join(self._objects.read(one)), name) for name, one in found.items()]

    def has_parts(self) -> bool:
        return False


@contextmanager
def in_bucket(prefix: str) -> Iterator[InBucket]:
    """A bucket on a server of its own; the environment of this process names it meanwhile."""
    with s3_server(BUCKET) as behind, troubled(behind) as server, pytest.MonkeyPatch.context() as m:
        for name, value in environ_of(server.endpoint).items():
            m.setenv(name, value)
        yield InBucket(server, prefix)
