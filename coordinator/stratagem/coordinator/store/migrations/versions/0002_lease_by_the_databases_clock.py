"""Adds a column to the lease: the time of the last renewal, by the database's own clock."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.add_column("lease", sa.Column("renewed_s", sa.Float(53), nullable=False, server_default="0"))
    # 0.1.0 looks here, and refuses what is newer than itself.
    op.execute("UPDATE meta SET value = '2' WHERE key = 'schema_version'")
