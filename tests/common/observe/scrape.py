"""Asks an endpoint for its metrics, as Prometheus does, and reads the answer with its parser."""

import asyncio
import json
import ssl
import urllib.request

from prometheus_client.parser import text_string_to_metric_families

from stratagem.client.local.cluster import LocalCluster
from stratagem.common.observe.exposition import DEPLOYMENT
from tests.patience import PATIENCE_S

Scraped = dict[str, dict[tuple[tuple[str, str], ...], float]]
"""By name of the sample (with _bucket, _sum, _count, _total) and labels."""


async def raw(address: str, request: bytes, context: ssl.SSLContext | None = None) -> bytes:
    """Everything that comes back for these bytes."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
    try:
        writer.write(request)
        async with asyncio.timeout(PATIENCE_S):
            return await reader.read()
    finally:
        writer.close()


async def scrape(address: str) -> Scraped:
    """From the loop that serves it."""
    answer = await raw(address, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK"), head
    return parsed(body.decode())


def scrape_from_outside(address: str) -> Scraped:
    """From another process."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=PATIENCE_S) as answer:
        return parsed(answer.read().decode())


def scrape_process(cluster: LocalCluster, process: str) -> Scraped:
    """A coordinator or worker of a cluster, by name."""
    ready = json.loads((cluster.folder / "ready" / process).read_text())
    return scrape_from_outside(ready["metrics_address"])


def parsed(text: str) -> Scraped:
    """Without the label that all metrics of ours have in common."""
    found: Scraped = {}
    for family in text_string_to_metric_families(text):
        found.setdefault(family.name, {})
        for sample in family.samples:
            labels = tuple(sorted((k, v) for k, v in sample.labels.items() if k != DEPLOYMENT))
            found.setdefault(sample.name, {})[labels] = sample.value
    return found


def labelled(**labels: str) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(labels.items()))


def families(scraped: Scraped) -> set[str]:
    """Names of metrics of ours, as they are defined."""
    return {name for name in scraped if name.startswith("stratagem_")}
