"""A fork of a process with an open client is told at once what it cannot do, and harms nobody."""

import json
import subprocess
import sys
from pathlib import Path

from stratagem.common.base.errors import WrongStateError
from tests.patience import PATIENCE_S
from tests.repository import ROOT

SCRIPT = """
import asyncio, json, os, sys
from pathlib import Path
from stratagem.client import AsyncClient, Client
from stratagem.common.base.errors import StratagemError
from tests.client.local.stand_in_cluster import make_cluster

async def ask(address):
    async with AsyncClient(address) as own:
        return await own.workers()

# Forks of a template would need one, which loads torch.
alone = {"PYTHONNODEBUGRANGES": "1"}
address, folder = sys.argv[1], Path(sys.argv[2])
with make_cluster(folder, workers=0, environment=alone) as cluster, Client(address) as client:
    assert len(client.workers()) == 2
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        said = []
        for attempt in (
            client.workers,
            lambda: Client(address),
            lambda: asyncio.run(ask(address)),
            lambda: cluster.processes,
            lambda: cluster.kill("coordinator"),
        ):
            try:
                attempt()
            except StratagemError as error:
                said.append([type(error).__name__, str(error)])
        client.close()
        cluster.close()
        os.write(writer, json.dumps(said).encode())
        sys.exit(3)
    os.close(writer)
    with open(reader) as told:
        said = json.loads(told.read())
    _, status = os.waitpid(pid, 0)
    alive = [len(client.workers()), cluster.folder.is_dir()]
print(json.dumps([os.getpid(), os.waitstatus_to_exitcode(status), alive, said]))
"""


def test_a_fork_with_an_open_client_says_what_it_cannot_do(address: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, address, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, timeout=PATIENCE_S)
    parent, status, alive, said = json.loads(done.stdout)
    assert (done.returncode, status) == (0, 3)
    assert alive == [2, True]
    assert [kind for kind, _ in said] == [WrongStateError.__name__] * 5
    begin = f"this process is a fork of process {parent}, in which a client of Stratagem was open"
    assert all(text.startswith(begin) for _, text in said[:3])
    assert "start processes with multiprocessing's spawn or forkserver" in said[0][1]
    own = f"this local cluster belongs to process {parent}, and this process is a fork of it"
    assert {text for _, text in said[3:]} == {own}
