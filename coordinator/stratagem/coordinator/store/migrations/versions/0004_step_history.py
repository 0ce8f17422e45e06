"""Adds the table of the step history: a row per party and segment, with values of its steps."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.create_table(
        "history",
        sa.Column("run_id", sa.String(64), primary_key=True),
        sa.Column("party", sa.Text, primary_key=True),
        sa.Column("segment", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("stride", sa.BigInteger, nullable=False),
        sa.Column("from_step", sa.BigInteger, nullable=False),
        sa.Column("to_step", sa.BigInteger, nullable=False),
        sa.Column("rows", sa.LargeBinary, nullable=False),
    )
