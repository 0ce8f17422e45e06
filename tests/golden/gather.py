"""Gathers runs of several journals into one: python -m tests.golden.gather NAME JOURNAL:RUN,RUN ...

What happens to a run by chance or by force (a client that leaves, keys or files that are lost) is
made by the tests of it, each on a cluster of its own. This takes those runs as they were recorded,
with the workers of the first journal, and writes them as SQL and what they replay to as JSON, like
tests/golden/write.py; a run may be named anew, as in `test-1f=golden-lost`. Folders become `/data`.
"""

import asyncio
import re
import sqlite3
import sys
import tempfile
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from tests.golden.replay import FOLDER, load, replay, summary_of

Runs = Mapping[str, str]
"""The name of a run in its journal, and the one that it gets."""
FOLDERS = re.compile(r"/(?:tmp|work|root|home|usr)/[^\"\\\s',]*")


def main(name: str, sources: list[tuple[Path, Runs]]) -> None:
    target = FOLDER / f"{name}.sql"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal.sqlite"
        gather(path, sources)
        with closing(sqlite3.connect(path)) as connection:
            sql = "\n".join(connection.iterdump())
        target.write_text(FOLDERS.sub("/data", sql) + "\n")
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(replay(load(target, Path(folder) / "journal.sqlite")))
    target.with_suffix(".json").write_text(summary_of(found))


def gather(path: Path, sources: list[tuple[Path, Runs]]) -> None:
    """Make a journal with the facts of these runs, and with no summaries of them."""
    first = sources[0][0]
    with closing(sqlite3.connect(first)) as old, closing(sqlite3.connect(path)) as new, new:
        old.backup(new)
        listed = new.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        for (table,) in listed.fetchall():
            columns = [each[1] for each in new.execute(f"PRAGMA table_info({table})")]
            if "run_id" in columns:
                kept = " WHERE run_id != ''" if table == "event" else ""
                new.execute(f"DELETE FROM {table}{kept}")
        for source, runs in sources:
            with closing(sqlite3.connect(source)) as journal:
                for run_id, known_as in runs.items():
                    asked = (
                        "SELECT seq, term, kind, schema_version, payload, idem_key, time_s, wall_s "
                        "FROM event WHERE run_id = ? ORDER BY seq"
                    )
                    rows = journal.execute(asked, [run_id]).fetchall()
                    assert rows, f"{source} has no run {run_id}"
                    new.executemany(
                        "INSERT INTO event (run_id, seq, term, kind, schema_version, payload, "
                        "idem_key, time_s, wall_s) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                        [(known_as, *row) for row in rows],
                    )


def _source(text: str) -> tuple[Path, Runs]:
    path, _, names = text.rpartition(":")
    pairs = (name.partition("=") for name in names.split(","))
    return Path(path), {run: known_as or run for run, _, known_as in pairs}


if __name__ == "__main__":
    main(sys.argv[1], [_source(text) for text in sys.argv[2:]])
