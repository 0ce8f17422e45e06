"""The command line, called in this process."""

import json
import sys
from collections.abc import Mapping
from functools import cache

from typer import testing
from typer.main import get_command

from stratagem.client.cli.main import assemble

PROGRAM = [sys.executable, "-m", "stratagem.program"]

APP = assemble()
# To look through all commands and their options takes longer than most commands do.
testing._get_command = cache(get_command)  # type: ignore[attr-defined]


def invoke(*arguments: object, env: Mapping[str, str] | None = None) -> testing.Result:
    return testing.CliRunner().invoke(APP, [str(each) for each in arguments], env=env)


def json_lines(text: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in text.splitlines()]
