"""The model of a run, exported by the client for other programs."""

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from stratagem.client.cli.main import assemble
from stratagem.client.local.cluster import LocalCluster
from stratagem.client.sdk.blocking import Client
from stratagem.common.base.errors import InvalidInputError
from tests.cluster.jobs import train
from tests.jobs import job
from tests.repository import ROOT

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.sweep,
    pytest.mark.promise("the model of a run becomes a program of its own"),
]


def test_a_run_becomes_a_program(
    client: Client, exact_cluster: LocalCluster, tmp_path: Path
) -> None:
    outcome = train(client, job("mlp", steps=3))
    path, run_id = tmp_path / "model.pt2", outcome.run.run_id
    named = ["export", run_id, "--to", f"torch-export:{path}", "--import-path", str(ROOT)]
    done = CliRunner().invoke(assemble(), [*named, "--coordinator", exact_cluster.address])
    assert done.exit_code == 0, done.output
    assert "differ from the model's by at most 0" in " ".join(done.output.split())
    assert "takes input float32[rows, " in done.output
    named[3] = f"torch-export:{tmp_path}/nowhere/m"
    refused = CliRunner().invoke(assemble(), [*named, "--coordinator", exact_cluster.address])
    assert refused.stderr.startswith(f"error: path: {tmp_path}/nowhere/m: there is no folder ")
    program = torch.export.load(path).module()
    found = {name: each.detach() for name, each in program.state_dict().items()}
    assert found.keys() == outcome.state.keys()
    assert all(torch.equal(found[name], each) for name, each in outcome.state.items())
    with pytest.raises(InvalidInputError, match=r"model\.pt2 exists already; nothing was"):
        outcome.run.export(path, "torch-export", import_path=[ROOT])
