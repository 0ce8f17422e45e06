"""The dashboard and the alert rules ask for metrics and labels that our processes really have."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from stratagem.common.base.errors import StratagemError
from stratagem.common.identity.tls import DEFAULT_TRUST_DOMAIN, worker_name
from stratagem.common.observe.exposition import DEPLOYMENT
from stratagem.common.rpc.status_codes import TABLE
from stratagem.coordinator.core import facts
from stratagem.coordinator.core.world import RunPhase
from stratagem.coordinator.process.metrics import METRICS as COORDINATOR
from stratagem.worker.process.metrics import METRICS as WORKER
from tests.deploy.compose import SERVICES, TLS_COMPOSE, TLS_SERVICES, coordinator, worker
from tests.repository import ROOT

pytestmark = pytest.mark.core

FOLDER = ROOT / "deploy" / "observability"
PROMETHEUS = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
RULES = [
    rule
    for group in yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]
]
DASHBOARD = json.loads((FOLDER / "grafana/dashboards/stratagem.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]

OF_PROMETHEUS = {"up", "process_resident_memory_bytes", "process_cpu_seconds_total"}
TARGET_LABELS = {"job", "instance"}
COMMON = TARGET_LABELS | {DEPLOYMENT}
"""What every metric has; the names of jobs and instances are those of whoever scrapes."""
WORDS = {
    *("and", "or", "by", "sum", "max", "min", "count", "rate", "increase", "vector", "ignoring"),
    *("histogram_quantile", "le", "__rate_interval"),
    *("absent", "time", "group", "last_over_time", "on", "predict_linear", "unless"),
}
SELECTOR = re.compile(r"\b([a-z_]+)\{([^}]*)\}")
GROUPING = re.compile(r"\b(?:by|ignoring|on) *\(([^)]*)\)")
MATCHER = re.compile(r'(\w+)(=~|!~|!=|=)"([^"]*)"')


SAMPLES = {
    metric.name + end: metric
    for metric in (*COORDINATOR, *WORKER)
    for end in (("_bucket", "_sum", "_count") if metric.kind == "histogram" else ("",))
}
"""Names as they can be asked for."""
LABELS = {label for metric in SAMPLES.values() for label in metric.labels}
FACTS = {name for name, each in vars(facts).items() if isinstance(each, type)}
VALUES = {
    "phase": {phase.value for phase in RunPhase},
    "error": {
        "internal",
        *(kind.__name__ for kind, _ in TABLE if issubclass(kind, StratagemError)),
    },
}


def queries() -> Iterator[str]:
    yield from (rule["expr"] for rule in RULES)
    yield from (target["expr"] for panel in PANELS for target in panel["targets"])


def test_queries_ask_for_what_there_is_and_for_each_metric() -> None:
    asked = sorted(set(queries()))
    for query in asked:
        check_query(query)
    names = set(re.findall(r"stratagem_[a-z_]+", " ".join(asked)))
    for metric in (*COORDINATOR, *WORKER):
        assert any(each.startswith(metric.name) for each in names), metric.name


def check_query(query: str) -> None:
    assert all(query.count(a) == query.count(b) for a, b in ("()", "{}", "[]")), query
    for name, inside in SELECTOR.findall(query):
        metric = SAMPLES.get(name)
        assert metric is not None or name in OF_PROMETHEUS, name
        labels = set(metric.labels) if metric is not None else set()
        for label, operator, value in MATCHER.findall(inside):
            assert label in labels, f"{name} has no label {label}"
            known = FACTS if name.endswith("facts_total") else VALUES.get(label)
            if known is not None:
                assert set(value.split("|") if "~" in operator else [value]) <= known, query
    for inside in GROUPING.findall(query):
        assert {label.strip() for label in inside.split(",")} <= LABELS | COMMON | {"le"}, query
    bare = GROUPING.sub("", re.sub(r"\{[^}]*\}|\[[^\]]*\]|offset \w+", "", query))
    for word in re.findall(r"[a-z_]+", bare):
        assert word in SAMPLES or word in OF_PROMETHEUS or word in WORDS, f"{word} in {query}"


def test_each_alert_says_what_to_do() -> None:
    names = [rule["alert"] for rule in RULES]
    assert len(set(names)) == len(names)
    for rule in RULES:
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert set(rule["annotations"]) == {"summary", "action"}
        told = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        assert told <= LABELS | COMMON


def test_panels_lie_side_by_side_and_name_the_datasource() -> None:
    (source,) = yaml.safe_load(
        (FOLDER / "grafana/provisioning/datasources/prometheus.yml").read_text()
    )["datasources"]
    cells: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at: dict[str, Any] = panel["gridPos"]
        own = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not own & cells, panel["title"]
        assert max(x for x, _ in own) < 24
        cells |= own
        if panel in PANELS:
            assert panel["datasource"] == {"type": source["type"], "uid": source["uid"]}
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    assert len({panel["title"] for panel in PANELS}) == len(PANELS)


def test_prometheus_and_grafana_find_each_other_and_our_processes() -> None:
    scraped = {
        (name, config["port"])
        for job in PROMETHEUS["scrape_configs"]
        for config in job["dns_sd_configs"]
        for name in config["names"]
    }
    told = {("coordinator", coordinator().metrics_port)}
    told |= {(name, worker(name).metrics_port) for name in ("worker", "worker-gpu")}
    assert scraped == told
    mounts = {
        target: source
        for name in ("prometheus", "grafana")
        for source, target, *_ in (volume.split(":") for volume in SERVICES[name]["volumes"])
    }
    over_tls = yaml.safe_load((FOLDER / "prometheus.tls.yml").read_text())
    for plain, secure in zip(PROMETHEUS["scrape_configs"], over_tls["scrape_configs"], strict=True):
        assert (plain["job_name"], secure["scheme"]) == (secure["job_name"], "https")
        (config,) = secure["dns_sd_configs"]
        own = {name for name in TLS_SERVICES if name.startswith(plain["job_name"].split("-")[1])}
        assert (set(config["names"]), config["port"]) == (own, plain["dns_sd_configs"][0]["port"])
        assert secure["tls_config"]["ca_file"] == "/run/secrets/ca.crt"
    assert [each["tls_config"]["server_name"] for each in over_tls["scrape_configs"]] == [
        "coordinator",
        worker_name(DEFAULT_TRUST_DOMAIN),
    ]
    assert over_tls["rule_files"] == PROMETHEUS["rule_files"]
    overriding = TLS_COMPOSE["services"]["prometheus"]
    assert overriding["secrets"] == ["ca.crt"]
    (mount,) = overriding["volumes"]
    assert mount.endswith("/prometheus.tls.yml:/etc/prometheus/prometheus.yml:ro")
    for path in PROMETHEUS["rule_files"]:
        assert mounts[path].endswith("/alerts.yml")
    assert mounts["/etc/prometheus/prometheus.yml"].endswith("/prometheus.yml")
    (provider,) = yaml.safe_load(
        (FOLDER / "grafana/provisioning/dashboards/stratagem.yml").read_text()
    )["providers"]
    assert mounts[provider["options"]["path"]] == "./deploy/observability/grafana/dashboards"
