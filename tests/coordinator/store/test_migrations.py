"""The tables of older journals become those of this version, in all databases."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from hatchling.builders.wheel import WheelBuilder
from sqlalchemy import Connection

from stratagem.common.base.errors import ConflictError
from stratagem.coordinator.store.journal.journal import Journal
from stratagem.coordinator.store.journal.lead_holder import Holder
from stratagem.coordinator.store.journal.schema import FOLDER
from stratagem.coordinator.store.journal.tables import REVISION, metadata
from tests.coordinator.store.journals import events
from tests.golden.replay import FOLDER as GOLDEN
from tests.golden.replay import load
from tests.repository import ROOT

FIRST_RELEASE = GOLDEN / "0.1.0.sql"


@contextmanager
def transaction(place: str | Path) -> Iterator[Connection]:
    """On an open journal's database."""
    with closing(Journal.open(place)) as journal, journal._database.write() as connection:
        yield connection


def differences(connection: Connection) -> list[Any]:
    """What is in the code and not in the database, or the other way round."""
    return list(compare_metadata(MigrationContext.configure(connection), metadata))


def test_the_migrations_lead_to_the_tables_of_the_code(place: str) -> None:
    with transaction(place) as connection:
        assert differences(connection) == []


def test_there_is_one_newest_migration_and_the_code_expects_it() -> None:
    config = Config()
    config.set_main_option("script_location", str(FOLDER))
    assert ScriptDirectory.from_config(config).get_heads() == [REVISION]


def test_a_journal_of_the_version_without_migrations_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    with closing(load(FIRST_RELEASE, path)) as journal:
        lead = journal.take_lead(Holder.of_this_process(), ttl_s=1)
        assert (lead.term, len(events(journal))) == (3, 342)
    with transaction(path) as migrated:
        assert differences(migrated) == []
        version = "SELECT value FROM meta WHERE key = 'schema_version'"
        assert migrated.exec_driver_sql(version).scalar() == "2", "0.1.0 would not refuse it"


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE alembic_version SET version_num = '0999'",
        "DROP TABLE alembic_version",  # and schema_version is one that 0.1.0 did not write
    ],
)
def test_a_journal_of_a_newer_version_is_refused_and_left_as_it_is(place: str, change: str) -> None:
    with transaction(place) as connection:
        connection.exec_driver_sql(change)
    for _ in range(2):
        with pytest.raises(ConflictError, match=rf"newer version; this one knows .* {REVISION}"):
            Journal.open(place)


def test_the_wheel_holds_the_migrations() -> None:
    versions = "stratagem/coordinator/store/journal/migrations/versions"
    files = WheelBuilder(str(ROOT)).recurse_included_files()
    packed = {file.distribution_path for file in files}
    assert {f"{versions}/{each.name}" for each in (FOLDER / "versions").glob("*.py")} <= packed
