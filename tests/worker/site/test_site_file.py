"""The site's file: what is wrong is named with its key, its value and what is allowed."""

import hashlib
from pathlib import Path

import pytest

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.code.signatures import make_keys
from stratagem.common.process.process_exit import MISTAKEN
from stratagem.worker.process import main as worker_main
from stratagem.worker.site.file import read_site
from tests.repository import ROOT
from tests.worker.site.jobs import ANY, PEERS, site_of

pytestmark = pytest.mark.core

DATA = '[data.xray]\nentrypoint = "anna_loaders:xray"\n'
RULE = '[[accept]]\ndata = ["xray"]\n'
WHOLE = f'site = "st-anna"\n{DATA}{RULE}'


def written(folder: Path, text: str) -> Path:
    file = folder / "site.toml"
    file.write_text(text)
    return file


def test_a_short_file_has_careful_defaults(tmp_path: Path) -> None:
    site = read_site(written(tmp_path, WHOLE))
    (rule,) = site.spec.accept
    assert (rule.code, rule.entrypoints, rule.metrics, rule.report) == ("none", (), (), "sums")
    assert rule.strategies == ("Federated",)
    assert (site.spec.share_errors, site.spec.audit.share_logs) == ("type", False)
    assert site.path(site.spec.audit.file) == tmp_path / "audit.jsonl"
    assert site.digest == hashlib.sha256(WHOLE.encode()).hexdigest()
    assert read_site(ROOT / "examples" / "sites" / "st-anna.toml").spec.site == "st-anna"
    with pytest.raises(InvalidInputError, match="No such file"):
        read_site(tmp_path / "gone.toml")


def test_keys_and_consent_are_read_with_it(tmp_path: Path) -> None:
    make_keys(tmp_path / "key", tmp_path / "keys.pem")
    (tmp_path / "consent.pdf").write_bytes(b"we agree")
    text = f'{WHOLE}code = "signed:keys.pem"\n[audit]\nconsent = "consent.pdf"\n'
    site = read_site(written(tmp_path, text))
    assert len(site.keys["signed:keys.pem"]) == 1
    assert site.consent == hashlib.sha256(b"we agree").hexdigest()
    assert {file.name for file in site.files} == {"site.toml", "keys.pem", "consent.pdf"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("site = ", "is not TOML"),
        ("", "site: missing"),
        (WHOLE.replace("st-anna", "st anna"), "site: 'st anna' is not 1 to 64 of A-Z"),
        (f'site = "a"\n{RULE}', "data: missing"),
        (f'site = "a"\ndata = 7\n{RULE}', r"data: must have at least one table \[data.NAME\]"),
        (f'site = "a"\n{DATA}', "accept: missing"),
        (f'site = "a"\naccept = []\n{DATA}', r"accept: \[\] is not allowed; must not be empty"),
        (WHOLE.replace('["xray"]', '["mri"]'), r"accept\[0\].data\[0\]: 'mri' is not one of xray"),
        (WHOLE.replace("entrypoint =", "entrypont ="), r"data.xray.entrypont: unknown key"),
        (WHOLE.replace("anna_loaders:xray", "anna_loaders"), "data.xray.entrypoint: 'anna_loader"),
        (
            WHOLE.replace("entrypoint", 'file = "x.safetensors"\nentrypoint'),
            "data.xray: needs exactly one of entrypoint, file; has entrypoint and file",
        ),
        (
            WHOLE.replace('entrypoint = "anna_loaders:xray"', 'file = "x.pt"'),
            "data.xray.file: 'x.pt' is not a .safetensors file",
        ),
        (WHOLE.replace("[[acc", "min_rows = 0\n[[acc"), "data.xray.min_rows: 0 is not allowed"),
        (f"{WHOLE}max_rounds = 0\n", r"accept\[0\].max_rounds: 0 is not allowed; must be >= 1"),
        (f"{WHOLE}max_epsilon = 0.0\n", r"accept\[0\].max_epsilon: 0.0 is not allowed"),
        (f'{WHOLE}require = ["trust"]\n', r"accept\[0\].require.*'trust' is not .*privacy"),
        (
            f'{WHOLE}strategies = ["DataParallel"]\n',
            r"strategies.*'DataParallel' is not .*Federated",
        ),
        (f'{WHOLE}code = "any"\n', r"accept\[0\].code: 'any' is not one of none, signed:FILE"),
        (f'{WHOLE}code = ["sha256:12"]\n', "code: 'sha256:12' is not sha256: and the 64 hex"),
        (f"{WHOLE}code = []\n", r"code: \[\] is not none, signed:FILE or a list"),
        (f'{WHOLE}code = "signed:no.pem"\n', r"accept\[0\].code: .*no.pem: No such file"),
        (f'{WHOLE}report = "all"\n', "accept.0..report.*'all' is not .*sums, none"),
        (f'{WHOLE}windows = ["Mon"]\n', r"accept\[0\].timezone: missing; windows are hours of a"),
        (f'{WHOLE}timezone = "UTC"\n', "timezone: has a meaning only together with windows"),
        (f'{WHOLE}windows = ["Mon"]\ntimezone = "Mars"\n', "timezone: 'Mars' is no time zone"),
        (f'{WHOLE}windows = ["Mon"]\ntimezone = "../x"\n', "timezone: '../x' is no time zone"),
        (f'{WHOLE}windows = ["Moon"]\ntimezone = "UTC"\n', "windows.0.: 'Moon' is not days"),
        (f'{WHOLE}[audit]\nconsent = "no.pdf"\n', "audit.consent: .*no.pdf: No such file"),
        (f"{WHOLE}[audit]\nshare_logs = 1\n", "audit.share_logs: 1 is not true or false"),
        (f'share_errors = "all"\n{WHOLE}', "share_errors: 'all' is not one of type, message"),
        (f"sites = 3\n{WHOLE}", "sites: unknown key; did you mean site"),
        (f"{WHOLE}submitters = []\n", r"submitters: \[\] is not allowed; must not be empty"),
        *(
            (f"peers = {wrong}\n{WHOLE}", "hex digits of a certificate's fingerprint")
            for wrong in ('["a"]', '["sha256:zz"]', f'["md5:{"a" * 64}"]')
        ),
        (f'peer_authority = "missing.pem"\n{WHOLE}', "peer_authority"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(InvalidInputError, match=said):
        read_site(written(tmp_path, text))


def test_a_list_with_a_wrong_item_is_not_called_empty(tmp_path: Path) -> None:
    text = f"{WHOLE}submitters = [3]\nmax_rounds = 0\n"
    with pytest.raises(InvalidInputError) as caught:
        read_site(written(tmp_path, text))
    assert [str(each) for each in caught.value.violations] == [
        "accept[0].submitters[0]: 3 is not text",
        "accept[0].max_rounds: 0 is not allowed; must be >= 1",
    ]


def test_who_requires_masks_names_its_peers(tmp_path: Path) -> None:
    required = f'{ANY}\nrequire = ["secure_aggregation"]'
    with pytest.raises(InvalidInputError, match=r"accept\[0\].require: .*needs peers or peer_auth"):
        site_of(tmp_path, required)
    assert site_of(tmp_path, ANY).pins is None
    pins = site_of(tmp_path, required, head=PEERS).pins
    assert pins is not None
    assert pins.fingerprints == {"a" * 64}


@pytest.mark.parametrize("written", ["AB" * 32, "ab" * 32, ":".join(["AB"] * 32)])
def test_a_fingerprint_may_be_written_as_openssl_prints_it(tmp_path: Path, written: str) -> None:
    site = site_of(tmp_path, ANY, head=f'peers = ["sha256:{written}"]\n')
    assert site.pins is not None
    assert site.pins.fingerprints == {"ab" * 32}


# ---- a worker takes what it allows from that file alone ----


def started(capfd: pytest.CaptureFixture[str], *flags: str, status: int = MISTAKEN) -> str:
    """What a worker says that does not start."""
    assert worker_main.main(["--coordinator", "127.0.0.1:1", "--name", "w", *flags]) == status
    return capfd.readouterr().err


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        (["--allow-code", "any"], "--allow-code"),
        (["--allow-code", "signed:keys.pem"], "--allow-code"),
        (["--allow", "consortium.*:*"], "--allow"),
        (["--local-data", "xray=x.safetensors"], "--local-data"),
    ],
)
def test_what_the_file_says_is_said_nowhere_else(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], flags: list[str], name: str
) -> None:
    site_of(tmp_path, ANY)
    file = tmp_path / "site.toml"
    said = started(capfd, "--site", str(file), *flags)
    assert f"{name} is said by the file of --site, {file}; leave {name} out" in said


def test_a_wrong_file_is_said_at_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    site_of(tmp_path, ANY)
    file = tmp_path / "site.toml"
    file.write_text(f"{file.read_text()}max_rounds = 0\n")
    said = started(capfd, "--site", str(file), status=1)
    assert f"stratagem worker: --site {file}: accept[0].max_rounds: 0 is not allowed" in said
