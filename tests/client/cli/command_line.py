"""The command line, called in this process."""

import json
import sys
from collections.abc import Mapping
from functools import cache

from typer import testing

from stratagem.client.cli.main import app

PROGRAM = [sys.executable, "-m", "stratagem.program"]

# To look through all commands and their options takes longer than most commands do.
testing._get_command = cache(testing._get_command)


def invoke(*arguments: object, env: Mapping[str, str] | None = None) -> testing.Result:
    return testing.CliRunner().invoke(app, [str(each) for each in arguments], env=env)


def json_lines(text: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in text.splitlines()]
