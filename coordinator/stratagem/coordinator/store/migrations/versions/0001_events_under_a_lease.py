"""The tables of 0.1.0, which knew no migrations: its journals are stamped with this revision."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "event",
        sa.Column(
            "position",
            sa.BigInteger().with_variant(sa.Integer, "sqlite"),
            primary_key=True,
            autoincrement=True,
        ),
        sa.Column("run_id", sa.String(64), nullable=False),
        sa.Column("seq", sa.BigInteger, nullable=False),
        sa.Column("term", sa.BigInteger, nullable=False),
        sa.Column("kind", sa.String(64), nullable=False),
        sa.Column("schema_version", sa.Integer, nullable=False),
        sa.Column("payload", sa.Text, nullable=False),
        sa.Column("idem_key", sa.String(256), nullable=True),
        sa.Column("time_s", sa.Float(53), nullable=False),
        sa.Column("wall_s", sa.Float(53), nullable=False),
        sa.UniqueConstraint("run_id", "seq"),
        sa.UniqueConstraint("run_id", "idem_key"),
        sqlite_autoincrement=True,
    )
    lease = op.create_table(
        "lease",
        sa.Column(
            "id", sa.Integer, sa.CheckConstraint("id = 1"), primary_key=True, autoincrement=False
        ),
        sa.Column("holder", sa.Text, nullable=False),
        sa.Column("term", sa.BigInteger, nullable=False),
        sa.Column("renewals", sa.BigInteger, nullable=False),
    )
    meta = op.create_table(
        "meta",
        sa.Column("key", sa.String(64), primary_key=True),
        sa.Column("value", sa.Text, nullable=False),
    )
    op.bulk_insert(lease, [{"id": 1, "holder": "", "term": 0, "renewals": 0}])
    op.bulk_insert(
        meta,
        [{"key": "schema_version", "value": "1"}, {"key": "clock_floor_s", "value": "0.0"}],
    )
