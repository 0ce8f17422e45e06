"""Settings of the coordinator process: flags first, then STRATAGEM_COORDINATOR_* variables."""

from pathlib import Path
from typing import Final, Literal, Self

from pydantic import Field, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from stratagem.common.base.units import Span
from stratagem.common.process.process import HEARTBEATS_PER_TTL, at_least
from stratagem.common.rpc.channel import MAX_MESSAGE_BYTES

MAX_JOB_BYTES: Final = MAX_MESSAGE_BYTES // 4
"""Largest size of a job: in the event of its submission it is a text inside a text, with others."""


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
        default="127.0.0.1:7070", description="host:port to serve on; port 0 picks one"
    )
    advertise: str = Field(
        default="",
        description="host:port at which others reach this coordinator; the listen address, or "
        "this host's name where that is every address",
    )
    relay: Literal["on", "off"] = Field(
        default="on",
        description="whether workers that cannot be dialled may be reached over streams that they "
        "keep open; see `stratagem worker --tunnel`",
    )
    health_port: int = Field(
        default=0, ge=0, le=65535, description="port of the health service; 0 picks"
    )
    metrics_port: int | None = Field(
        default=None, ge=0, le=65535, description="port of Prometheus metrics; 0 picks"
    )
    metrics_tls: bool = Field(
        default=True, description="HTTPS for metrics, where there is a certificate"
    )
    metrics_tls_cert: Path | None = Field(
        default=None, description="certificate of the metrics; --tls-cert unless set"
    )
    metrics_tls_key: Path | None = Field(default=None, description="the key of --metrics-tls-cert")
    metrics_client_ca: Path | None = Field(
        default=None, description="authorities that the certificates of scrapers need"
    )
    metrics_token_file: Path | None = Field(
        default=None, description="a file with the bearer token that scrapers must send"
    )
    metrics_deployment: str = Field(
        default="",
        description="label `deployment` of all metrics; the trust domain of --tls-cert unless set, "
        "which is `stratagem` without one",
    )
    data_dir: Path = Field(default=Path(".stratagem"), description="journal, blobs, spool, logs")
    blob_store: str = Field(
        default="",
        description="s3://BUCKET/PREFIX for states, data and updates; below the data dir if unset",
    )
    state_path: Literal["direct", "relayed"] = Field(
        default="relayed",
        description="how states of synchronous runs come into the store: relayed through this "
        "process as one file each, or direct as leaves that workers write by themselves: in "
        "DATA-DIR/states those with --state-folder and --data-plane trusted, in a --blob-store all "
        "but those of sites, by requests that this process signs",
    )
    blob_cache_bytes: int | None = Field(
        default=None,
        gt=0,
        description="local copies of what is in an object store; 32 GiB unless set, or half of "
        "the file system where that is less",
    )
    journal: str = Field(
        default="",
        description="postgresql://user@host/database, or a SQLite file; "
        "default journal.sqlite in the data folder",
    )
    journal_password_file: Path | None = Field(
        default=None, description="password of the journal's database; or PGPASSFILE"
    )
    privacy_secret: Path | None = Field(
        default=None,
        description="a file of 32 random bytes, the same for all coordinators of a journal, from "
        "which the noise of private runs is drawn; needed with PostgreSQL, else "
        "privacy-secret in the data folder, made at first use",
    )
    ready_file: Path | None = Field(default=None, description="written as JSON once serving")
    name: str = Field(
        default="", description="this coordinator's name in the lease; default host:pid"
    )
    lease_ttl_s: float = Field(
        default=10.0, gt=0, description="a silent leader is replaced after this"
    )
    heartbeat_interval_s: float = Field(
        default=2.0,
        gt=0,
        description="how often workers beat; more than 500 of them for each of these seconds beat "
        "more seldom, up to 10 s apart",
    )
    worker_ttl_s: float = Field(
        default=10.0,
        gt=0,
        description="a silent worker is lost after this, and 2.4 s later for each second that "
        "workers beat more seldom",
    )
    rendezvous_timeout_s: float = Field(
        default=10.0, gt=0, description="wait for members at a barrier"
    )
    max_job_bytes: int = Field(default=2**20, gt=0, description="size of a job's JSON")
    max_graph_nodes: int = Field(default=5000, gt=0, description="nodes of a job's graph")
    max_state_bytes: int = Field(default=64 * 2**30, gt=0, description="size of one state")
    max_spool_bytes: int = Field(
        default=256 * 2**30, gt=0, description="size of all spooled updates"
    )
    max_active_runs: int = Field(default=1000, gt=0, description="runs that may be active at once")
    max_state_tensors: int = Field(default=32_768, gt=0, description="tensors of one state")
    max_workers: int = Field(default=10_000, gt=0, description="workers that may be alive at once")
    forget_workers_after: Span = Field(
        default="7d",
        validate_default=True,
        description="a lost worker that no active run needs is forgotten after this",
    )
    keep_runs: int = Field(
        default=10_000,
        ge=0,
        description="of the runs that have ended, so many are kept; the oldest are deleted",
    )
    keep_runs_for: Span = Field(
        default="90d", validate_default=True, description="an ended run is deleted after this"
    )
    keep_logs_for: Span = Field(
        default="30d",
        validate_default=True,
        description="log and profile of an ended run are deleted after this, if not with the run",
    )
    max_uploads: int = Field(default=16, gt=0, description="data sets that arrive at once")
    max_watchers: int = Field(
        default=1000, gt=0, description="clients that follow a run's events or log"
    )
    max_watchers_each: int = Field(
        default=100, gt=0, description="of these, how many one token or certificate may be"
    )
    max_calls: int = Field(
        default=4096, gt=0, description="calls of clients that may be open at once"
    )
    stream_idle_timeout_s: float = Field(
        default=30.0,
        gt=0,
        description="a caller that is silent this long inside a request is given up",
    )
    allow_insecure_network: bool = Field(
        default=False, description="serve on other than loopback addresses without TLS"
    )
    tls_ca: Path | None = Field(
        default=None, description="certificates of the authorities that callers and workers need"
    )
    tls_cert: Path | None = Field(
        default=None, description="this coordinator's certificate; files are read again on change"
    )
    tls_key: Path | None = Field(default=None, description="the key of --tls-cert")
    revoked_file: Path | None = Field(
        default=None, description="certificates that count no more; see `stratagem certs revoke`"
    )
    tokens_file: Path | None = Field(
        default=None, description="who may call with a token; made by `stratagem token create`"
    )
    token_listen: str = Field(
        default="",
        description="host:port for people with tokens, under TLS and without their certificates",
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
