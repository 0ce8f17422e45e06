"""Brings the tables of a journal to the present revision when it is opened.

Those of a new journal are made as they are now; those of an older one are migrated by Alembic.
Owns what is refused: a journal of a newer version. A journal of 0.1.0, which knew no revisions, is
given the first one and goes on from there.
"""

from pathlib import Path
from typing import Final

from sqlalchemy import (
    Column,
    Connection,
    MetaData,
    PrimaryKeyConstraint,
    String,
    Table,
    insert,
    inspect,
    select,
    text,
)

from stratagem.common.base.errors import ConflictError
from stratagem.coordinator.store.journal.database import Database
from stratagem.coordinator.store.journal.tables import (
    CLOCK_FLOOR,
    REVISION,
    lease,
    meta,
    metadata,
)

FIRST: Final = "0001"
FOLDER: Final = Path(__file__).parent / "migrations"

_stamp: Final = Table(
    "alembic_version",
    MetaData(),
    Column("version_num", String(32), nullable=False),
    PrimaryKeyConstraint("version_num", name="alembic_version_pkc"),
)
"""As Alembic makes it."""


def migrate(database: Database) -> None:
    """Make or alter the tables, all or nothing. Raises ConflictError for a newer journal."""
    with database.read() as connection:
        if _revision(connection) == REVISION:
            return
    # A server ends a transaction that stands still, as it may while this machine is busy importing.
    database.persist(lambda _is_repeat: _bring_up_to_date(database))


def _bring_up_to_date(database: Database) -> None:
    with database.write() as connection:
        if database.migration_lock:
            connection.execute(text(database.migration_lock))
        revision = _revision(connection)  # another process may have been here first
        if not revision:
            _make(connection)
        elif revision != REVISION:
            _upgrade(connection, revision)


def _revision(connection: Connection) -> str:
    """Return the revision that the journal is stamped with; FIRST for one of 0.1.0, "" for none at
    all."""
    tables = inspect(connection).get_table_names()
    if "alembic_version" in tables:
        return str(connection.execute(select(_stamp.c.version_num)).scalar() or "")
    if "meta" not in tables:
        return ""
    version = connection.execute(select(meta.c.value).where(meta.c.key == "schema_version"))
    number = version.scalar()
    return FIRST if number == "1" else f"schema {number}"


def _make(connection: Connection) -> None:
    """Make what all migrations would, without the time that it takes to import Alembic."""
    metadata.create_all(connection)
    _stamp.create(connection)
    connection.execute(insert(_stamp).values(version_num=REVISION))
    connection.execute(insert(lease).values(id=1, holder="", term=0, renewals=0))
    # 0.1.0 looks at the version of the schema, and refuses what is newer than itself.
    values = {"schema_version": "2", CLOCK_FLOOR: "0.0"}
    connection.execute(insert(meta), [{"key": k, "value": v} for k, v in values.items()])


def _upgrade(connection: Connection, present: str) -> None:
    from alembic import command  # 0.1 s, which only a journal of an older version costs
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config()
    config.set_main_option("script_location", str(FOLDER))
    config.attributes["connection"] = connection
    known = [revision.revision for revision in ScriptDirectory.from_config(config).walk_revisions()]
    if present not in known:
        raise ConflictError(
            f"the journal has revision {present!r}, written by a newer version; "
            f"this one knows {FIRST} to {REVISION}"
        )
    if present == FIRST and not inspect(connection).has_table("alembic_version"):
        command.stamp(config, FIRST)
    command.upgrade(config, REVISION)
