"""The tables of older journals become those of this version, in all databases."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from hatchling.builders.wheel import WheelBuilder
from sqlalchemy import Connection, inspect

from stratagem.common.base.errors import ConflictError
from stratagem.coordinator.store import schema
from stratagem.coordinator.store.journal import Journal
from stratagem.coordinator.store.lead import Holder
from stratagem.coordinator.store.schema import FOLDER, REVISION, metadata
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


def content(connection: Connection) -> dict[str, Any]:
    """All that there is, as the database says it."""
    found, inspector = {}, inspect(connection)
    for name in sorted(inspector.get_table_names()):
        columns = [{**each, "type": repr(each["type"])} for each in inspector.get_columns(name)]
        found[name] = (
            columns,
            inspector.get_pk_constraint(name),
            sorted(repr(each) for each in inspector.get_unique_constraints(name)),
            inspector.get_check_constraints(name),
            inspector.get_indexes(name),
            sorted(connection.exec_driver_sql(f"SELECT * FROM {name}").all()),
        )
    return found


def migrated_from_nothing(connection: Connection) -> None:
    config = Config()
    config.set_main_option("script_location", str(FOLDER))
    config.attributes["connection"] = connection
    command.upgrade(config, REVISION)


def test_a_new_journal_is_what_all_migrations_make_of_nothing(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with transaction(place) as connection:
        made = content(connection)
        assert differences(connection) == []
        for table in made:
            connection.exec_driver_sql(f"DROP TABLE {table}")
    monkeypatch.setattr(schema, "_make", migrated_from_nothing)
    with transaction(place) as connection:
        assert differences(connection) == []
        migrated = content(connection)
    assert migrated == made


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
    versions = "stratagem/coordinator/store/migrations/versions"
    files = WheelBuilder(str(ROOT)).recurse_included_files()
    packed = {file.distribution_path for file in files}
    assert {f"{versions}/{each.name}" for each in (FOLDER / "versions").glob("*.py")} <= packed
