"""Adds a column to the step history: which segments a row holds that has those of several."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.add_column("history", sa.Column("ends", sa.Text, nullable=True))
