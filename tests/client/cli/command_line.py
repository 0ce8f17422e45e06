"""The command line, called in this process."""

import json
import sys

from typer.testing import CliRunner, Result

from stratagem.client.cli.main import app

PROGRAM = [sys.executable, "-m", "stratagem.program"]


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(each) for each in arguments])


def json_lines(text: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in text.splitlines()]
