"""The settings of one worker process: flags, else STRATAGEM_WORKER_* in the environment.

This module has their names, defaults and checks. Nothing else in the worker reads the environment
or the command line.
"""

import os
import socket
import sys
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self, get_args

from pydantic import (
    AfterValidator,
    BeforeValidator,
    DirectoryPath,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.base.ids import check_run_id, check_worker_id
from stratagem.common.base.text import dialled_host, split_address
from stratagem.common.observe.logs import LEVELS
from stratagem.common.process.cpu_threads import (
    ThreadChoice,
    available_cores,
    default_threads,
    threads_told,
)
from stratagem.common.process.process import at_least, flag
from stratagem.common.rpc.channel import split_addresses
from stratagem.common.rpc.probe import check_proxy
from stratagem.worker.host.exit_record import check_previous_exit
from stratagem.worker.process.launch_place import (
    COORDINATOR,
    Launcher,
    coordinator_of,
    cores_at,
    detect,
    device_at,
)

# ---- Worker settings ----

MAX_BLOB_MEMORY_BYTES: Final = 4 << 30
MAX_STALL_REPORT_S: Final = 365 * 86_400.0
"""The longest time, as timers of the system have a limit."""
PREEMPT_SIGNALS: Final = ("USR1", "USR2", "HUP", "QUIT", "XCPU", "URG")
"""The signals that schedulers can be configured to send."""


def _split(value: object) -> object:
    """Split values at commas: repeated flags are a list, the environment has "a,b", or both."""
    if value is None:
        return []
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list | tuple):
        return value
    pieces = (piece.strip() for item in value for piece in str(item).split(","))
    return [piece for piece in pieces if piece]


def _pairs(value: object) -> object:
    """Parse NAME=VALUE items into a mapping."""
    if isinstance(value, dict):
        return value
    items = _split(value)
    if not isinstance(items, list):
        return items
    wrong = [item for item in items if not item.partition("=")[2]]
    if wrong:
        raise ValueError(f"{wrong[0]!r} is not NAME=FILE")
    return {name.strip(): rest for name, _, rest in (item.partition("=") for item in items)}


Strings = Annotated[list[str], NoDecode, BeforeValidator(_split)]


class WorkerSettings(BaseSettings):
    """One worker process. Lists are repeatable flags, or one value with commas."""

    model_config = SettingsConfigDict(
        env_prefix="STRATAGEM_WORKER_",
        extra="forbid",
        frozen=True,
        cli_prog_name="stratagem worker",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
    )

    coordinator: str = Field(
        description="HOST:PORT of the coordinator, or a comma-separated list of several of which "
        "one leads; - reads it from standard input"
    )
    name: str = Field(
        default_factory=socket.gethostname,
        description="id of this worker, stable across restarts; the host name if unset",
    )
    pool: str = Field(
        "",
        description="group of workers that share one certificate; the worker's id is NAME.POOL",
    )
    listen: str = Field(
        "127.0.0.1:0", description="HOST:PORT to listen on; port 0 picks a free one"
    )
    rendezvous: Launcher | None = Field(
        None,
        description="launcher that has started this process along with others; name, coordinator, "
        "address, device and threads, unless set, are taken from its environment variables; env: "
        "whichever launcher has set its variables",
    )
    for_run: str = Field(
        "",
        description="id of the run that this worker is started for: once the run has ended, the "
        "worker exits with status 0; if the run is unknown when the worker joins, it exits with "
        "status 2",
    )
    ephemeral: bool = Field(
        False,
        description="the name of this worker will not be used again: once lost, it is forgotten "
        "within minutes; with --rendezvous this is on unless set",
    )
    advertise: str = Field(
        "",
        description="HOST or HOST:PORT at which others reach this worker; if unset, the listen "
        "address, or the host name if that is a wildcard address",
    )
    tunnel: bool = Field(
        False,
        description="make outgoing connections only: the coordinator reaches this worker through "
        "them; other workers do not reach it",
    )
    proxy: str = Field(
        "",
        description="http://[USER:PASSWORD@]HOST:PORT of the proxy to the coordinator; if unset, "
        "https_proxy and no_proxy of the environment apply",
    )
    health_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="port of the health service (grpc.health.v1); 0 picks a free port",
    )
    metrics_port: int | None = Field(
        None, ge=0, le=65535, description="port of Prometheus metrics; 0 picks a free port"
    )
    metrics_tls: bool = Field(
        True, description="serve metrics over HTTPS if there is a certificate"
    )
    metrics_tls_cert: Path | None = Field(
        None, description="certificate of the metrics endpoint; --tls-cert if unset"
    )
    metrics_tls_key: Path | None = Field(None, description="private key of --metrics-tls-cert")
    metrics_client_ca: Path | None = Field(
        None, description="CA certificates used to verify the client certificates of scrapers"
    )
    metrics_token_file: Path | None = Field(
        None, description="file with the bearer token that scrapers must send"
    )
    metrics_deployment: str = Field(
        "",
        description="value of the label `deployment` of all metrics; if unset, the trust domain "
        "of --tls-cert, or `stratagem` without a certificate",
    )
    tags: Strings = Field([], description="labels by which strategies select workers")
    allow: Strings = Field([], description="entry points that jobs may name, such as 'package.*:*'")
    allow_code: str = Field(
        "none",
        description="code that jobs may bring along: none, signed:FILE (verified with one of the "
        "public keys in FILE), digests:FILE (listed in FILE) or any",
    )
    site: Path | None = Field(
        None,
        description="site.toml, which decides what this worker takes part in and what may leave "
        "it; replaces --allow, --allow-code and --local-data",
    )
    privacy_secret: Path | None = Field(
        None,
        description="file of 32 random bytes that protect the rows of this worker in jobs with "
        "privacy.unit row; created in --data-dir if unset",
    )
    import_path: Strings = Field([], description="directories of the users' modules")
    data_root: Strings = Field(
        [], description="folders that data.path of a job must be in; --import-path if unset"
    )
    local_data: Annotated[dict[str, str], NoDecode, BeforeValidator(_pairs)] = Field(
        {}, description="NAME=FILE.safetensors, data that never leaves this worker"
    )
    threads: int = Field(
        default_factory=lambda: default_threads(os.environ),
        ge=1,
        description="number of torch threads; if unset, OMP_NUM_THREADS or MKL_NUM_THREADS of the "
        "environment, else the number of cores that this process may use",
    )
    max_readers: int = Field(
        default_factory=available_cores,
        ge=0,
        description="maximum number of processes that read rows (data.readers) at once; 0: the "
        "compute thread reads them",
    )
    device: str = Field("cpu", description="cpu or cuda:N")
    ready_file: Path | None = Field(
        None, description="file that is written once the worker is serving"
    )
    data_dir: Path | None = Field(
        None,
        description="folder for blobs that exceed the memory limit, for what federated clients "
        "keep private, and for the record from which the next process learns how this one ended",
    )
    build_dir: DirectoryPath | None = Field(
        None,
        description="existing folder on a disk for unnamed temporary files that hold a model "
        "while it is built from its seed, so that it need not fit into this worker's memory; "
        "built in memory if unset",
    )
    state_folder: Path | None = Field(
        None,
        description="path at which this worker sees the folder DATA-DIR/states of a coordinator "
        "with --state-path direct, to write states there and to read them; requires --data-plane "
        "trusted, and write permission",
    )
    signed_states: bool = Field(
        True,
        description="write and read states in the object store of a coordinator with --state-path "
        "direct, with requests that the coordinator signs; a worker with --site never does; turn "
        "it off if this worker cannot reach the store",
    )
    open_files: bool = Field(
        True,
        description="read states from files that a coordinator on this machine has open, and let "
        "it read those of this worker, instead of streaming them; a machine that does not allow "
        "this is detected",
    )
    previous_exit: Annotated[str, AfterValidator(check_previous_exit)] = Field(
        "",
        description="set by a supervisor: how the previous process ended, as [PID:]STATUS "
        "(negative: a signal) or [PID:]stopped",
    )
    max_blob_memory_bytes: int = Field(
        MAX_BLOB_MEMORY_BYTES,
        ge=0,
        description="maximum size of the states and data of runs held in memory",
    )
    max_state_bytes: int = Field(
        64 << 30, gt=0, description="maximum size of one state or data set"
    )
    max_state_tensors: int = Field(
        32_768, gt=0, description="maximum number of tensors in one state or data set"
    )
    max_uploads: int = Field(
        16, gt=0, description="maximum number of states and data sets received at once"
    )
    max_early_bytes: int = Field(
        256 << 20,
        gt=0,
        description="maximum size of messages from other members that arrive before they are "
        "expected",
    )
    max_sessions: int = Field(
        16_384, gt=0, description="maximum number of sessions (parts of runs) open on this worker"
    )
    max_calls: int = Field(4096, gt=0, description="maximum number of calls open at once")
    stream_idle_timeout_s: float = Field(
        30.0, gt=0, description="time after which a request whose caller sends nothing is aborted"
    )
    allow_insecure_network: bool = Field(
        False, description="serve without TLS on non-loopback addresses"
    )
    tls_ca: Path | None = Field(
        None, description="CA certificates used to verify the coordinator and other workers"
    )
    tls_cert: Path | None = Field(
        None, description="this worker's certificate; files are reloaded when they change"
    )
    tls_key: Path | None = Field(None, description="private key of --tls-cert")
    revoked_file: Path | None = Field(
        None, description="list of revoked certificates; see `stratagem certs revoke`"
    )
    data_plane: Literal["trusted", "tls"] | None = Field(
        None,
        description="protection of the data that workers exchange: trusted allows any engine, tls "
        "only gRPC; if unset, tls with certificates, else trusted",
    )
    mesh: Literal["auto", "shm", "nccl", "gloo", "grpc"] = Field(
        "auto",
        description="engine for the exchange between workers; auto picks the best one that all "
        "members of a party have",
    )
    activation_store: str = Field(
        "",
        description="file:///DIR or s3://BUCKET/PREFIX, used by DataStore; must be the same for "
        "all workers",
    )
    exchange_timeout_s: float = Field(
        120.0, gt=0, description="longest wait for another member within one step"
    )
    compile_timeout_s: float = Field(
        900.0,
        ge=0,
        description="added to --exchange-timeout-s in jobs with compiled code, as another member "
        "may be compiling; also added to --abort-grace-s while code is compiled, or in the first "
        "step on this worker of a run that has not ended",
    )
    drain_grace_s: float = Field(30.0, ge=0, description="time to finish a step after SIGTERM")
    stall_report_s: float = Field(
        60.0,
        gt=0,
        le=MAX_STALL_REPORT_S,
        description="how long this worker may stay in one operation before the status of the run "
        "reports it; nothing is aborted",
    )
    abort_grace_s: float = Field(
        30.0,
        gt=0,
        description="how long an aborted plan, for example one whose run was stopped, may stay in "
        "one operation while others wait for it; then this process exits with a status on which "
        "supervisors restart it",
    )
    preempt_signal: str = Field(
        "USR1",
        description="signal that drains this worker as SIGTERM does, for schedulers that send it "
        "before they end a job; empty for none",
    )
    log_level: str = Field("info", description="debug, info, warning or error")
    log_json: bool = Field(False, description="log JSON lines")

    @property
    def worker_id(self) -> str:
        """Return the id by which the coordinator knows this worker: NAME, or NAME.POOL."""
        return f"{self.name}.{self.pool}" if self.pool else self.name

    @property
    def threads_text(self) -> str:
        """Return the number of threads, and the environment variable that sets it."""
        given = threads_told(os.environ)
        return str(given if given and given.number == self.threads else ThreadChoice(self.threads))

    @property
    def may_serve_plaintext(self) -> bool:
        """Return whether health, which is always in plaintext, may listen on any address."""
        return self.allow_insecure_network or self.tls_ca is not None

    @model_validator(mode="before")
    @classmethod
    def _fill_in_the_place(cls, values: dict[str, Any]) -> dict[str, Any]:
        return values if values.get("rendezvous") is None else with_place(values)

    @field_validator("for_run")
    @classmethod
    def _is_run_id(cls, value: str) -> str:
        return check_run_id(value) if value else value

    @field_validator("name")
    @classmethod
    def _is_worker_id(cls, value: str) -> str:
        return check_worker_id(value)

    @field_validator("pool")
    @classmethod
    def _makes_a_worker_id(cls, value: str, info: ValidationInfo) -> str:
        name = info.data.get("name", "")
        if value and "." in name:
            raise ValueError(f"a pool's certificate is for names without dots, and not {name!r}")
        if value:
            check_worker_id(f"{name}.{value}")
        return value

    @field_validator("mesh")
    @classmethod
    def _fits_the_device(cls, value: str, info: ValidationInfo) -> str:
        device = str(info.data.get("device", "cpu"))
        needs = {"shm": "cpu", "gloo": "cpu", "nccl": "cuda"}.get(value, "")
        if not device.startswith(needs):
            raise ValueError(f"{value} is for {needs} devices, and --device is {device}")
        return value

    @field_validator("log_level")
    @classmethod
    def _is_level(cls, value: str) -> str:
        if value not in LEVELS:
            raise ValueError(f"{value!r} is not one of {', '.join(LEVELS)}")
        return value

    @field_validator("preempt_signal")
    @classmethod
    def _may_be_handled(cls, value: str) -> str:
        if value and value not in PREEMPT_SIGNALS:
            raise ValueError(f"{value!r} is not one of {', '.join(PREEMPT_SIGNALS)}")
        return value

    @field_validator("activation_store")
    @classmethod
    def _is_store(cls, value: str) -> str:
        if value and not value.startswith(("file:///", "s3://")):
            raise ValueError(f"{value!r} is neither file:///DIR nor s3://BUCKET/PREFIX")
        return value

    @field_validator("coordinator", mode="before")
    @classmethod
    def _from_standard_input(cls, value: str) -> str:
        return sys.stdin.readline().strip() if value == "-" else value

    @field_validator("coordinator")
    @classmethod
    def _are_addresses(cls, value: str) -> str:
        for address in split_addresses(value):
            split_address(address)
        return value

    @field_validator("listen")
    @classmethod
    def _is_address(cls, value: str) -> str:
        split_address(value)
        return value

    @field_validator("proxy")
    @classmethod
    def _is_proxy(cls, value: str) -> str:
        return check_proxy(value)

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        for name in ("listen", "advertise"):
            if self.tunnel and name in self.model_fields_set:
                raise ValueError(f"--{name} is for workers that are dialled, and not for --tunnel")
        at_least(self, "max_calls", "max_uploads", 2, "else uploads could keep all others out")
        if self.state_folder is not None and self.site is not None:
            raise ValueError("--state-folder gives states away, and so is not for --site")
        given = {
            "allow": bool(self.allow),
            "allow_code": self.allow_code != "none",
            "local_data": bool(self.local_data),
        }
        for name, is_given in given.items():
            if self.site is not None and is_given:
                text = f"is said by the file of --site, {self.site}; leave {flag(name)} out"
                raise ValueError(f"{flag(name)} {text}")
        return self

    @property
    def takes_signed_requests(self) -> bool:
        """Return whether states may be written to an object store and read from there."""
        return self.signed_states and self.site is None

    @property
    def data_roots(self) -> tuple[Path, ...]:
        """Return the folders below which jobs may name files, with symbolic links resolved."""
        return tuple(Path(root).resolve() for root in self.data_root or self.import_path)


def advertised(settings: WorkerSettings, bound_port: int) -> str:
    """Return HOST:PORT at which others reach a worker that listens on this port."""
    host, _ = split_address(settings.listen)
    if ":" in settings.advertise:
        return settings.advertise
    return f"{settings.advertise or dialled_host(host)}:{bound_port}"


def from_command_line(arguments: list[str]) -> WorkerSettings:
    """Return the settings of this process; exit with a message when they are wrong."""
    options: dict[str, Any] = {"_cli_parse_args": arguments}
    return WorkerSettings(**options)


# ---- Settings from the place that a launcher gave ----
#
# These settings follow from the environment, name, cores and CUDA devices of this host, and from
# the address from which it reaches the coordinator.


def with_place(values: dict[str, Any]) -> dict[str, Any]:
    """Return settings, completed from a launcher's variables where they are not set.

    Raises ValueError, which names the variable, where these describe no place.
    """
    if values["rendezvous"] not in get_args(Launcher):
        return values  # it is refused with the other wrong values
    place = detect(values["rendezvous"], os.environ, socket.gethostname(), os.getpid())
    num_cores = cores_at(place, os.environ, available_cores())
    by_environment = threads_told(os.environ)
    defaults: dict[str, Any] = {
        "name": place.name,
        "threads": num_cores if by_environment is None else by_environment.number,
        "max_readers": num_cores,
        "ephemeral": True,
    }
    if "device" not in values:
        defaults["device"] = device_at(place, _num_cuda_devices())
    coordinator = values.get("coordinator") or coordinator_of(os.environ)
    if not coordinator:
        problem = f"neither {COORDINATOR} nor MASTER_ADDR of the environment tells where it is"
        raise InvalidInputError.at("--coordinator", problem)
    defaults["coordinator"] = coordinator
    if "listen" not in values and not values.get("tunnel") and coordinator != "-":
        defaults["listen"] = _own_address_towards(split_addresses(coordinator)[0])
    return defaults | {name: value for name, value in values.items() if value is not None}


def _num_cuda_devices() -> int:
    import torch  # only here, since other users of the settings do not need it

    return torch.cuda.device_count()


def _own_address_towards(coordinator: str) -> str:
    """Return the address from which this host sends packets to the coordinator, with a free port.

    A connected UDP socket sends nothing.
    """
    host, port = split_address(coordinator)
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            source = str(probe.getsockname()[0])
    except OSError as error:
        problem = f"{host} is not known from here: {error}; say --listen HOST:PORT to start anyway"
        raise InvalidInputError.at("--coordinator", problem) from None
    return f"[{source}]:0" if ":" in source else f"{source}:0"
