"""Adds a column to the step history: the segments in a row, if the row has more than one."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.add_column("history", sa.Column("ends", sa.Text, nullable=True))
