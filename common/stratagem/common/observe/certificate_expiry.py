"""Exposes when the certificates of a process expire, for alerts that come before they do.

Told as points in time, with their beginning: how near an end is too near depends on how long a
certificate is valid. Files are read when somebody scrapes, in its thread; what cannot be read tells
nothing here, and is said by whoever uses it.
"""

from collections.abc import Iterator
from contextlib import suppress
from typing import Final

from stratagem.common.base.errors import InvalidInputError
from stratagem.common.identity.certificate_chain import AUTHORITY, ChainCertificate, first_to_end
from stratagem.common.identity.tls_files import Material, TlsFiles, links_of
from stratagem.common.observe.metric_definition import Metric, Values
from stratagem.common.observe.scrape_guard import MetricsSettings

EXPIRY: Final = Metric(
    "stratagem_certificate_expiry_seconds",
    "gauge",
    "when a certificate ends, in seconds since 1970: the process's own under its role, `authority` "
    "the first to end of those above it, `metrics` what --metrics-tls-cert names",
    ("role",),
)
START: Final = Metric(
    "stratagem_certificate_start_seconds",
    "gauge",
    "since when the same certificate is valid, in seconds since 1970",
    ("role",),
)
METRICS: Final = "metrics"


def expiries(settings: MetricsSettings) -> Iterator[tuple[Metric, Values]]:
    """Yield the ends and beginnings of the certificates' validity, by role; no values where a
    process has no certificate."""
    links = _links(settings)
    yield EXPIRY, {(role,): link.ends.timestamp() for role, link in links.items()}
    yield START, {(role,): link.starts.timestamp() for role, link in links.items()}


def _links(settings: MetricsSettings) -> dict[str, ChainCertificate]:
    links = {}
    material = _material(settings)
    if material is not None and material.cert_id is not None:
        links[str(material.cert_id.role)] = material.chain[0]
        authority = first_to_end(material.chain[1:])
        if authority is not None:
            links[AUTHORITY] = authority
    if settings.metrics_tls_cert is not None:
        with suppress(InvalidInputError):
            links[METRICS] = links_of("metrics_tls_cert", settings.metrics_tls_cert)[0]
    return links


def _material(settings: MetricsSettings) -> Material | None:
    if settings.tls_ca is None or settings.tls_cert is None or settings.tls_key is None:
        return None
    try:
        return TlsFiles(settings.tls_ca, settings.tls_cert, settings.tls_key).read()
    except InvalidInputError:
        return None
