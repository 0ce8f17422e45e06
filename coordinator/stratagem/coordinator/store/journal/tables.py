"""The tables of the journal, the same for every database, as the newest migration leaves them.

A change here comes with a migration in migrations/versions, which raises REVISION. A coordinator
that stands by migrates while another one leads, so a migration may add, but not take away what the
version before it uses.
"""

from typing import Final

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    Float,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
)

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
"""Made of the events of a run, which stay the truth: without it they are read."""

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
"""Values of the steps of each segment that has ended. No event and no decision depends on them."""

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
"""The key of meta for the newest time of events that were deleted."""
IDENTITY: Final = "identity"
"""The key of meta for what tells this journal from others; absent until it is asked for."""
