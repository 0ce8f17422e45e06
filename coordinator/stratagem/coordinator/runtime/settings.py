"""The settings of the coordinator process: flags first, then STRATAGEM_COORDINATOR_* variables."""

from pathlib import Path
from typing import Final, Literal, Self

from pydantic import Field, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from stratagem.common.base.units import Span
from stratagem.common.process.process import HEARTBEATS_PER_TTL, at_least
from stratagem.common.rpc.channel import MAX_MESSAGE_BYTES

MAX_JOB_BYTES: Final = MAX_MESSAGE_BYTES // 4
"""The largest size of a job: the event of its submission quotes it inside another text."""


class Settings(BaseSettings):
    """The settings of a coordinator; every field is also a flag of `stratagem coordinator`."""

    model_config = SettingsConfigDict(
        env_prefix="STRATAGEM_COORDINATOR_",
        cli_parse_args=True,
        cli_prog_name="stratagem coordinator",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        extra="forbid",
    )

    listen: str = Field(
        default="127.0.0.1:7070", description="host:port to listen on; port 0 picks a free one"
    )
    advertise: str = Field(
        default="",
        description="host:port at which others reach this coordinator; if unset, the listen "
        "address, or the host name if that is a wildcard address",
    )
    relay: Literal["on", "off"] = Field(
        default="on",
        description="whether workers that accept no connections may be reached over streams that "
        "they keep open; see `stratagem worker --tunnel`",
    )
    health_port: int = Field(
        default=0, ge=0, le=65535, description="port of the health service; 0 picks a free port"
    )
    metrics_port: int | None = Field(
        default=None, ge=0, le=65535, description="port of Prometheus metrics; 0 picks a free port"
    )
    metrics_tls: bool = Field(
        default=True, description="serve metrics over HTTPS if there is a certificate"
    )
    metrics_tls_cert: Path | None = Field(
        default=None, description="certificate of the metrics endpoint; --tls-cert if unset"
    )
    metrics_tls_key: Path | None = Field(
        default=None, description="private key of --metrics-tls-cert"
    )
    metrics_client_ca: Path | None = Field(
        default=None,
        description="CA certificates used to verify the client certificates of scrapers",
    )
    metrics_token_file: Path | None = Field(
        default=None, description="file with the bearer token that scrapers must send"
    )
    metrics_deployment: str = Field(
        default="",
        description="value of the label `deployment` of all metrics; if unset, the trust domain "
        "of --tls-cert, or `stratagem` without a certificate",
    )
    data_dir: Path = Field(
        default=Path(".stratagem"),
        description="folder for the journal, blobs, spooled updates and logs",
    )
    blob_store: str = Field(
        default="",
        description="s3://BUCKET/PREFIX for states, data and updates; in the data folder if unset",
    )
    state_path: Literal["direct", "relayed"] = Field(
        default="relayed",
        description="how states of synchronous runs get into the store: relayed through this "
        "process, as one file each, or direct, as leaves that workers write themselves: to "
        "DATA-DIR/states from workers with --state-folder and --data-plane trusted, to a "
        "--blob-store from all workers without --site, with requests that this process signs",
    )
    blob_cache_bytes: int | None = Field(
        default=None,
        gt=0,
        description="size of the local cache of an object store; if unset, 32 GiB, or half of the "
        "file system if that is less",
    )
    journal: str = Field(
        default="",
        description="postgresql://user@host/database, or a SQLite file; "
        "default journal.sqlite in the data folder",
    )
    journal_password_file: Path | None = Field(
        default=None,
        description="file with the password of the journal's database; alternatively, set "
        "PGPASSFILE",
    )
    privacy_secret: Path | None = Field(
        default=None,
        description="file of 32 random bytes, the same for all coordinators of a journal, from "
        "which the noise of private runs is drawn; required with PostgreSQL; otherwise, if unset, "
        "privacy-secret in the data folder, created at first use",
    )
    ready_file: Path | None = Field(
        default=None, description="JSON file that is written once the coordinator is serving"
    )
    name: str = Field(
        default="", description="this coordinator's name in the lease; default host:pid"
    )
    lease_ttl_s: float = Field(
        default=10.0, gt=0, description="time after which a silent leader is replaced"
    )
    heartbeat_interval_s: float = Field(
        default=2.0,
        gt=0,
        description="interval of the workers' heartbeats; it grows, up to 10 s, with more than "
        "500 workers for each of these seconds",
    )
    worker_ttl_s: float = Field(
        default=10.0,
        gt=0,
        description="time after which a silent worker is lost; it grows by 2.4 s for each second "
        "by which the heartbeat interval grows",
    )
    rendezvous_timeout_s: float = Field(
        default=10.0, gt=0, description="longest wait for members at a barrier"
    )
    max_job_bytes: int = Field(default=2**20, gt=0, description="maximum size of a job's JSON")
    max_graph_nodes: int = Field(
        default=5000, gt=0, description="maximum number of nodes in a job's graph"
    )
    max_state_bytes: int = Field(default=64 * 2**30, gt=0, description="maximum size of one state")
    max_spool_bytes: int = Field(
        default=256 * 2**30, gt=0, description="maximum size of all spooled updates"
    )
    max_active_runs: int = Field(
        default=1000, gt=0, description="maximum number of runs active at once"
    )
    max_state_tensors: int = Field(
        default=32_768, gt=0, description="maximum number of tensors in one state"
    )
    max_workers: int = Field(
        default=10_000, gt=0, description="maximum number of workers alive at once"
    )
    forget_workers_after: Span = Field(
        default="7d",
        validate_default=True,
        description="time after which a lost worker that no active run needs is forgotten",
    )
    keep_runs: int = Field(
        default=10_000,
        ge=0,
        description="number of ended runs to keep; the oldest ones beyond it are deleted",
    )
    keep_runs_for: Span = Field(
        default="90d", validate_default=True, description="time after which an ended run is deleted"
    )
    keep_logs_for: Span = Field(
        default="30d",
        validate_default=True,
        description="time after which the log and profile of an ended run are deleted, if the run "
        "is not deleted earlier",
    )
    max_uploads: int = Field(
        default=16, gt=0, description="maximum number of data sets received at once"
    )
    max_watchers: int = Field(
        default=1000,
        gt=0,
        description="maximum number of clients following the events or log of a run",
    )
    max_watchers_each: int = Field(
        default=100,
        gt=0,
        description="maximum number of such clients for each token or certificate",
    )
    max_calls: int = Field(
        default=4096, gt=0, description="maximum number of client calls open at once"
    )
    stream_idle_timeout_s: float = Field(
        default=30.0,
        gt=0,
        description="time after which a request whose caller sends nothing is aborted",
    )
    allow_insecure_network: bool = Field(
        default=False, description="serve without TLS on non-loopback addresses"
    )
    tls_ca: Path | None = Field(
        default=None, description="CA certificates used to verify callers and workers"
    )
    tls_cert: Path | None = Field(
        default=None,
        description="this coordinator's certificate; files are reloaded when they change",
    )
    tls_key: Path | None = Field(default=None, description="private key of --tls-cert")
    revoked_file: Path | None = Field(
        default=None, description="list of revoked certificates; see `stratagem certs revoke`"
    )
    tokens_file: Path | None = Field(
        default=None,
        description="file of the tokens that callers may use; made by `stratagem token create`",
    )
    token_listen: str = Field(
        default="",
        description="host:port for people with tokens, over TLS without client certificates",
    )
    reflection: bool = Field(default=False, description="offer gRPC reflection")
    log_level: str = Field(default="info", description="debug, info, warning or error")
    log_json: bool = Field(default=False, description="log JSON lines")

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        why = "a lease must outlive a heartbeat that is late"
        at_least(self, "worker_ttl_s", "heartbeat_interval_s", HEARTBEATS_PER_TTL, why)
        why = "else those who follow runs could keep all others out"
        at_least(self, "max_calls", "max_watchers", 2, why)
        at_least(self, "max_calls", "max_uploads", 2, "else uploads could keep all others out")
        at_least(self, "max_spool_bytes", "max_state_bytes", 1, "else a state could never arrive")
        if self.max_job_bytes > MAX_JOB_BYTES:
            raise ValueError(
                f"--max-job-bytes is {self.max_job_bytes} and must be at most {MAX_JOB_BYTES}: a "
                f"message has at most {MAX_MESSAGE_BYTES} bytes"
            )
        return self

    @property
    def may_serve_plaintext(self) -> bool:
        """Return True if health, which is always in plaintext, may listen on any address."""
        return self.allow_insecure_network or self.tls_ca is not None
