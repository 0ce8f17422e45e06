"""Adds the table of summaries of ended runs, so that their events need not be read to show them."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.create_table(
        "summary",
        sa.Column("run_id", sa.String(64), primary_key=True),
        sa.Column("position", sa.BigInteger().with_variant(sa.Integer, "sqlite"), nullable=False),
        sa.Column("version", sa.String(64), nullable=False),
        sa.Column("brief", sa.Text, nullable=False),
        sa.Column("shown", sa.Text, nullable=False),
    )
