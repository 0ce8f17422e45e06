"""Jobs that are offered to the sites of these tests, and the files of these."""

from pathlib import Path
from typing import Any

from stratagem.common.job import JobSpec
from stratagem.worker.site.file import SiteFile, read_site
from tests.jobs import job

DIGEST = "a" * 64


def offered(
    strategy: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
    **changes: Any,
) -> JobSpec:
    """FedAvg of five clients on data of their own."""
    whole = {
        "type": "Federated",
        "num_clients": 5,
        "rounds": 10,
        "aggregation": {"method": "FedAvg"},
        "client_selection": {"method": "All"},
        "options": options or {},
        **(strategy or {}),
    }
    return job(
        strategy=whole,
        **{
            "data": {"worker_local": "xray"},
            "optimizer": {"name": "sgd", "lr": 0.1},
            **changes,
        },
    )


def site_of(folder: Path, *rules: str, more: str = "", head: str = "") -> SiteFile:
    """A site with the data xray and ct, and rules as TOML. head: keys of the site itself."""
    data = "".join(f'[data.{name}]\nfile = "{name}.safetensors"\n' for name in ("xray", "ct"))
    accept = "".join(f"[[accept]]\n{rule}\n" for rule in rules)
    file = folder / "site.toml"
    file.write_text(f'site = "st-anna"\n{head}{data}{accept}{more}')
    return read_site(file)


ANY = 'data = ["xray"]\nentrypoints = ["tests.userland.*:*"]'
"""A rule that takes any job on the x-rays."""
NIGHTS = f'{ANY}\nwindows = ["Mon-Fri 19:00-06:00"]\ntimezone = "Europe/Vienna"'
PEERS = f'peers = ["sha256:{"a" * 64}"]\n'
