"""Tutorials run as notebooks leave nothing behind, and meet nobody else's coordinator."""

import re
from pathlib import Path

import pytest

from docs.execute_tutorials import DEFAULT_ADDRESS, execute

PAGE = f"""<!--
---
jupyter:
  kernelspec: {{display_name: Python 3, language: python, name: python3}}
---
-->

```bash
sleep 10000 > /dev/null 2>&1 &
echo $!
```

```bash
echo {DEFAULT_ADDRESS} is $STRATAGEM_COORDINATOR
```

```bash
[ $STRATAGEM_COORDINATOR = $STRATAGEM_COORDINATOR_LISTEN ]
[ $STRATAGEM_COORDINATOR != 127.0.0.1:$((7000 + 70)) ]
```
"""


OF_LIBRARIES = re.compile(
    r"[IWEF]\d{4} \d\d:\d\d:\d\d"  # gRPC's, of clients that other tests have left
    r"|Assertion failed: .* \(src/\w+\.cpp:\d+\)$"  # libzmq's, of a kernel that is being ended
)


def test_a_page_runs_in_a_folder_of_its_own_without_a_word(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("nbclient", reason="needs the extra dev")
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    left, address, _ = execute(page)
    assert address.text == f"```text\n{DEFAULT_ADDRESS} is {DEFAULT_ADDRESS}\n```\n"
    assert has_ended(left.text.split()[1])
    lines = capfd.readouterr().err.splitlines()
    said = [line for line in lines if not OF_LIBRARIES.match(line)]
    assert said == []


def has_ended(process: str) -> bool:
    stat = Path("/proc", process, "stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"
