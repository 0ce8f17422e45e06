"""The journal under kill -9, SIGSTOP and its failpoints; over PostgreSQL in the sweep."""

import json
import os
import signal
from pathlib import Path

import pytest

from stratagem.coordinator.store.journal import Journal
from stratagem.coordinator.store.lead import Holder
from tests.coordinator.store.journals import events
from tests.programs import conversation, run

IMPORTS = """
import json, random
from stratagem.coordinator.store.journal import Journal, Record
from stratagem.coordinator.store.lead import FencedError
from stratagem.coordinator.store.lead import Holder
def lead(place):
    log = Journal.open(place)
    return log, log.take_lead(Holder.of_this_process(), ttl_s=60).term
def records(kind, *seqs):
    return [Record("a", seq, kind, 1, "x" * 300, 0.0, 0.0) for seq in seqs]
"""

APPEND = """
log, term = lead(sys.argv[1])
log.append(term, records("K", 0))
log.append(term, records("K", 1, 2))
"""

SUM_UP = """
log, term = lead(sys.argv[1])
log.append(term, records("K", *range(6)))
log.sum_up(term, records("S", 3, 4))
"""

LEADER = """
log, term = lead(sys.argv[1])
for seq, action in enumerate(sys.stdin):
    try:
        if action == "append\\n":
            log.append(term, records("K", seq))
        else:
            log.renew(term)
        print("done", flush=True)
    except FencedError as error:
        print(error, flush=True)
"""

# Forks, so that no round need import everything.
KILLED_UNDER_LOAD = """
def write_for_ever(place, pipe):
    log, term = lead(place)
    seq = sum(1 for _ in log.read("a"))
    while True:
        size = 1 + seq % 3
        log.append(term, records("K", *range(seq, seq + size)))
        seq += size
        os.write(pipe, b"%d\\n" % (seq - 1))

random.seed(1)
Journal.open(sys.argv[1]).close()  # imports what the children need
acknowledged = []
for _ in range(5):
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        write_for_ever(sys.argv[1], writing)
    os.close(writing)
    with os.fdopen(reading) as lines:
        for _ in range(random.randint(1, 30)):
            last = lines.readline()
        os.kill(pid, signal.SIGKILL)
        last = (lines.read().split() or [last])[-1]
    os.waitpid(pid, 0)
    acknowledged.append(int(last))
print(json.dumps(acknowledged))
"""


@pytest.mark.parametrize(
    ("code", "failpoint", "kinds"),
    [
        (APPEND, "coordinator.journal.before_commit", "K"),
        (APPEND, "coordinator.journal.after_commit", "KKK"),
        (SUM_UP, "coordinator.journal.before_commit", "KKKKKK"),
        (SUM_UP, "coordinator.journal.after_commit", "SSK"),
    ],
)
def test_a_crash_at_a_commit_leaves_all_or_nothing(
    place: str, tmp_path: Path, code: str, failpoint: str, kinds: str
) -> None:
    (tmp_path / failpoint).write_text("1")
    status, _ = run(IMPORTS + code, place, failpoints=tmp_path)
    assert status == 137
    log = Journal.open(place)
    found = [each.record for each in events(log)]
    assert "".join(each.kind for each in found) == kinds
    if code == APPEND:
        assert [each.seq for each in found] == list(range(len(kinds)))
    assert log.take_lead(Holder.of_this_process(), ttl_s=60).term == 2
    log.close()


def test_kills_under_load_lose_no_acknowledged_event(place: str) -> None:
    _, out = run(IMPORTS + KILLED_UNDER_LOAD, place)
    acknowledged = json.loads(out)
    log = Journal.open(place)
    seqs = [each.record.seq for each in events(log)]
    assert seqs == list(range(len(seqs)))
    assert len(acknowledged) == 5
    assert acknowledged == sorted(set(acknowledged))
    assert seqs[-1] >= acknowledged[-1]
    log.close()


def test_a_frozen_leader_finds_itself_fenced(place: str) -> None:
    with conversation(IMPORTS + LEADER, place) as (pid, ask):
        assert ask("append") == "done"
        os.kill(pid, signal.SIGSTOP)
        log = Journal.open(place)
        lead = log.take_lead(Holder.of_this_process(), ttl_s=0.2)
        assert lead.term == 2
        os.kill(pid, signal.SIGCONT)
        assert ask("append") == "term 1 no longer leads: term 2 does"
        assert ask("renew") == "term 1 no longer leads: term 2 does"
        log.renew(lead.term)
        assert [each.record.seq for each in events(log)] == [0]
        log.close()
