"""Bring the tables of a journal to the present revision when it is opened.

A new journal gets the present tables; Alembic migrates those of an older one. A journal of a newer
version is refused. A journal of 0.1.0, which had no revisions, is given the first one and
continues from there.
"""

from pathlib import Path
from typing import Final

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    Connection,
    Float,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    String,
    Table,
    Text,
    UniqueConstraint,
    insert,
    inspect,
    select,
    text,
)

from stratagem.common.base.errors import ConflictError
from stratagem.coordinator.store.database import Database

# ---- Migration ----

FIRST: Final = "0001"
FOLDER: Final = Path(__file__).parent / "migrations"

_stamp: Final = Table(
    "alembic_version",
    MetaData(),
    Column("version_num", String(32), nullable=False),
    PrimaryKeyConstraint("version_num", name="alembic_version_pkc"),
)
"""The table with the schema revision, equal to Alembic's own."""


def migrate(database: Database) -> None:
    """Create or migrate the tables, all or nothing. Raises ConflictError for a newer journal."""
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
    """Return the journal's schema revision: FIRST for a journal of 0.1.0, "" if there is none."""
    tables = inspect(connection).get_table_names()
    if "alembic_version" in tables:
        return str(connection.execute(select(_stamp.c.version_num)).scalar() or "")
    if "meta" not in tables:
        return ""
    version = connection.execute(select(meta.c.value).where(meta.c.key == "schema_version"))
    number = version.scalar()
    return FIRST if number == "1" else f"schema {number}"


def _make(connection: Connection) -> None:
    """Create the tables that all migrations together would, without the time to import Alembic."""
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
    revisions = [script.revision for script in ScriptDirectory.from_config(config).walk_revisions()]
    if present not in revisions:
        raise ConflictError(
            f"the journal has revision {present!r}, written by a newer version; "
            f"this one knows {FIRST} to {REVISION}"
        )
    if present == FIRST and not inspect(connection).has_table("alembic_version"):
        command.stamp(config, FIRST)
    command.upgrade(config, REVISION)


# ---- Tables ----
#
# The tables are the same for every database, as the newest migration leaves them.
#
# A change here comes with a migration in migrations/versions, which raises REVISION. A standby
# coordinator migrates while another one leads, so a migration may add, but must not remove what
# the previous version uses.

REVISION: Final = "0005"

metadata: Final = MetaData()

# SQLite counts up only columns of exactly this type.
Position: Final = BigInteger().with_variant(Integer, "sqlite")

event: Final = Table(
    "event",
    metadata,
    Column("position", Position, primary_key=True, autoincrement=True),
    Column("run_id", String(64), nullable=False),
    Column("seq", BigInteger, nullable=False),
    Column("term", BigInteger, nullable=False),
    Column("kind", String(64), nullable=False),
    Column("schema_version", Integer, nullable=False),
    Column("payload", Text, nullable=False),
    Column("idem_key", String(256), nullable=True),
    Column("time_s", Float(53), nullable=False),
    Column("wall_s", Float(53), nullable=False),
    UniqueConstraint("run_id", "seq"),
    UniqueConstraint("run_id", "idem_key"),
    sqlite_autoincrement=True,  # a position is never used twice, also after delete_run
)

summary: Final = Table(
    "summary",
    metadata,
    Column("run_id", String(64), primary_key=True),
    # Of the newest event that it covers; where the run has a newer one, or none, it is void.
    Column("position", Position, nullable=False),
    Column("version", String(64), nullable=False),
    Column("brief", Text, nullable=False),
    Column("shown", Text, nullable=False),
)
"""Summaries of runs, derived from their events: without a summary, a run's events are read."""

history: Final = Table(
    "history",
    metadata,
    Column("run_id", String(64), primary_key=True),
    Column("party", Text, primary_key=True),
    Column("segment", BigInteger, primary_key=True, autoincrement=False),
    # Steps that a row of the segment's series stands for.
    Column("stride", BigInteger, nullable=False),
    Column("from_step", BigInteger, nullable=False),
    Column("to_step", BigInteger, nullable=False),
    Column("rows", LargeBinary, nullable=False),
    # Of several segments in one row: JSON, [[segment, its last step], ...] in order.
    Column("ends", Text, nullable=True),
)
"""The step history: values of the steps of ended segments. No event or decision depends on it."""

lease: Final = Table(
    "lease",
    metadata,
    Column("id", Integer, CheckConstraint("id = 1"), primary_key=True, autoincrement=False),
    Column("holder", Text, nullable=False),  # "" once released
    Column("term", BigInteger, nullable=False),
    Column("renewals", BigInteger, nullable=False),
    # By the database's clock, seconds since 1970.
    Column("renewed_s", Float(53), nullable=False, server_default="0"),
)

meta: Final = Table(
    "meta",
    metadata,
    Column("key", String(64), primary_key=True),
    Column("value", Text, nullable=False),
)
CLOCK_FLOOR: Final = "clock_floor_s"
"""The key in `meta` for the newest time of deleted events."""
IDENTITY: Final = "identity"
"""The key in `meta` for the identifier of this journal, which is made when first needed."""
