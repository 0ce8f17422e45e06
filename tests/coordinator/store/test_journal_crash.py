"""The journal under kill -9, SIGSTOP and its failpoints; over PostgreSQL in the sweep."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from stratagem.coordinator.store.journal.journal import Journal
from stratagem.coordinator.store.journal.lead_holder import Holder
from tests.coordinator.store.journals import events
from tests.programs import run, start

APPEND_ONE = """
from stratagem.coordinator.store.journal.journal import Journal, Record
from stratagem.coordinator.store.journal.lead_holder import Holder
log = Journal.open(sys.argv[1])
term = log.take_lead(Holder.of_this_process(), ttl_s=10).term
log.append(term, [Record("a", 0, "K", 1, "{}", 0.0, 0.0)])
log.append(term, [Record("a", 1, "K", 1, "{}", 0.0, 0.0), Record("a", 2, "K", 1, "{}", 0.0, 0.0)])
"""

SUM_UP = """
from stratagem.coordinator.store.journal.journal import Journal, Record
from stratagem.coordinator.store.journal.lead_holder import Holder
log = Journal.open(sys.argv[1])
term = log.take_lead(Holder.of_this_process(), ttl_s=10).term
log.append(term, [Record("a", seq, "K", 1, "{}", 0.0, 0.0) for seq in range(6)])
log.sum_up(term, [Record("a", seq, "S", 1, "{}", 0.0, 0.0) for seq in (3, 4)])
"""

LEADER = """
from stratagem.coordinator.store.journal.journal import Journal, Record
from stratagem.coordinator.store.journal.lead import FencedError
from stratagem.coordinator.store.journal.lead_holder import Holder
log = Journal.open(sys.argv[1])
term = log.take_lead(Holder.of_this_process(), ttl_s=10).term
print("leads", flush=True)
for seq, action in enumerate(sys.stdin):
    try:
        if action == "append\\n":
            log.append(term, [Record("a", seq, "K", 1, "{}", 0.0, 0.0)])
        else:
            log.renew(term)
        print("done", flush=True)
    except FencedError as error:
        print(error, flush=True)
"""

# Forks, so that 20 rounds need not import everything 20 times.
KILLED_UNDER_LOAD = """
import json, random, time
from stratagem.coordinator.store.journal.journal import Journal, Record
from stratagem.coordinator.store.journal.lead_holder import Holder

def write_for_ever(place, pipe):
    log = Journal.open(place)
    term = log.take_lead(Holder.of_this_process(), ttl_s=60).term
    seq = sum(1 for _ in log.read("a"))
    while True:
        size = 1 + seq % 3
        rows = [Record("a", seq + i, "K", 1, "x" * 300, 0.0, 0.0) for i in range(size)]
        log.append(term, rows)
        seq += size
        os.write(pipe, b"%d\\n" % (seq - 1))

random.seed(1)
Journal.open(sys.argv[1]).close()  # imports what the children need
acknowledged = []
for _ in range(20):
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        write_for_ever(sys.argv[1], writing)
    os.close(writing)
    with os.fdopen(reading) as lines:
        for _ in range(random.randint(1, 60)):
            last = lines.readline()
        os.kill(pid, signal.SIGKILL)
        last = (lines.read().split() or [last])[-1]
    os.waitpid(pid, 0)
    acknowledged.append(int(last))
print(json.dumps(acknowledged))
"""


@pytest.fixture(name="place")
def _place(journal_place: Callable[[str], str], request: pytest.FixtureRequest) -> str:
    return journal_place(request.param)


OVER_BOTH = pytest.mark.parametrize(
    "place", ["sqlite", pytest.param("postgres", marks=pytest.mark.sweep)], indirect=True
)


@OVER_BOTH
@pytest.mark.parametrize(
    ("failpoint", "num_events"),
    [("coordinator.journal.before_commit", 1), ("coordinator.journal.after_commit", 3)],
)
def test_a_crash_at_a_commit_leaves_all_or_nothing(
    place: str, tmp_path: Path, failpoint: str, num_events: int
) -> None:
    (tmp_path / failpoint).write_text("1")
    status, _ = run(APPEND_ONE, place, failpoints=tmp_path)
    assert status == 137
    log = Journal.open(place)
    assert [each.record.seq for each in events(log)] == list(range(num_events))
    assert log.take_lead(Holder.of_this_process(), ttl_s=60).term == 2
    log.close()


@OVER_BOTH
@pytest.mark.parametrize(
    ("failpoint", "kinds"),
    [("coordinator.journal.before_commit", "KKKKKK"), ("coordinator.journal.after_commit", "SSK")],
)
def test_a_crash_while_events_are_summed_up_leaves_all_or_their_summary(
    place: str, tmp_path: Path, failpoint: str, kinds: str
) -> None:
    (tmp_path / failpoint).write_text("1")
    status, _ = run(SUM_UP, place, failpoints=tmp_path)
    assert status == 137
    log = Journal.open(place)
    assert "".join(each.record.kind for each in events(log)) == kinds
    log.close()


@OVER_BOTH
def test_twenty_kills_under_load_lose_no_acknowledged_event(place: str) -> None:
    _, out = run(KILLED_UNDER_LOAD, place)
    acknowledged = json.loads(out)
    log = Journal.open(place)
    seqs = [each.record.seq for each in events(log)]
    assert seqs == list(range(len(seqs)))
    assert len(acknowledged) == 20
    assert acknowledged == sorted(set(acknowledged))
    assert seqs[-1] >= acknowledged[-1]
    log.close()


@OVER_BOTH
def test_a_frozen_leader_finds_itself_fenced(place: str) -> None:
    with start(LEADER, place) as frozen:
        assert frozen.stdin is not None
        assert frozen.stdout is not None

        def ask(action: str) -> str:
            assert frozen.stdin is not None
            assert frozen.stdout is not None
            print(action, file=frozen.stdin, flush=True)
            return frozen.stdout.readline().strip()

        assert frozen.stdout.readline() == "leads\n"
        assert ask("append") == "done"
        os.kill(frozen.pid, signal.SIGSTOP)
        log = Journal.open(place)
        lead = log.take_lead(Holder.of_this_process(), ttl_s=0.2)
        assert lead.term == 2
        os.kill(frozen.pid, signal.SIGCONT)
        assert ask("append") == "term 1 no longer leads: term 2 does"
        assert ask("renew") == "term 1 no longer leads: term 2 does"
        log.renew(lead.term)
        assert [each.record.seq for each in events(log)] == [0]
        log.close()
        frozen.stdin.close()
