"""What stands in the tables of a journal, read and changed behind the coordinator's back."""

import sqlite3
from contextlib import closing
from pathlib import Path

from tests.coordinator.core.simulation import RUN


def of_run(journal: Path, table_name: str) -> int:
    with closing(sqlite3.connect(journal)) as connection:
        query = f"SELECT count(*) FROM {table_name} WHERE run_id = ?"
        return int(connection.execute(query, (RUN,)).fetchone()[0])


def change(journal: Path, statement: str) -> None:
    with closing(sqlite3.connect(journal)) as connection, connection:
        connection.execute(statement)
