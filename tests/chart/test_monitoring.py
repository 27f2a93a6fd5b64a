"""Alerts and panels use metrics that exist, and alerts lead to their page."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import Metric

from backstay_operator.metrics import Metrics as OperatorMetrics
from backstay_protocol.clock import SYSTEM_CLOCK
from backstay_protocol.ids import CheckpointId
from backstay_protocol.messages import RankProgress, TierState
from backstay_protocol.names import TIERS
from backstay_sidecar.metrics import Metrics
from support.rendered_chart import objects, the

ROOT = Path(__file__).resolve().parents[2]
ON: dict[str, Any] = {
    "metrics": {
        name: {"enabled": True} for name in ("serviceMonitor", "prometheusRule", "dashboard")
    }
}
NAME = re.compile(r"\bbackstay_[a-z_]+")


def known() -> set[str]:
    """Names as Prometheus sees them."""
    found = set()
    for registry in (Metrics(SYSTEM_CLOCK).registry, OperatorMetrics().registry):
        for family in registry.collect():
            ending = {"counter": "_total", "histogram": "_bucket"}.get(family.type, "")
            found.add(f"{family.name}{ending}")
    return found


def alerts() -> list[dict[str, Any]]:
    rule = the("PrometheusRule", objects(ON))
    return [one for group in rule["spec"]["groups"] for one in group["rules"]]


def dashboard() -> dict[str, Any]:
    text = the("ConfigMap", objects(ON), "backstay-dashboard")["data"]["backstay.json"]
    found: dict[str, Any] = json.loads(text)
    return found


def expressions() -> list[str]:
    panels = [panel for panel in dashboard()["panels"] if panel["type"] != "row"]
    return [target["expr"] for panel in panels for target in panel["targets"]]


def families() -> list[Metric]:
    registries = (Metrics(SYSTEM_CLOCK).registry, OperatorMetrics().registry)
    return [family for registry in registries for family in registry.collect()]


def test_no_series_is_named_after_a_rank_a_pod_or_a_step() -> None:
    sidecar, operator = Metrics(SYSTEM_CLOCK), OperatorMetrics()
    states = [TierState(tier=tier, newest=CheckpointId(7, 1), newest_time=1.0) for tier in TIERS]
    ranks = [
        RankProgress(
            rank=rank, step=40 + rank, step_time=1.0, published_step=40, attempt=1, state=3
        )
        for rank in range(8)
    ]
    text = sidecar.render(states, ranks).decode()
    assert "backstay_step 40.0" in text
    operator.note_jobs([["Running", "Degraded"], ["Running"]])
    operator.replaced.labels("NodeLost").inc()
    labels = {
        label
        for registry in (sidecar.registry, operator.registry)
        for family in registry.collect()
        for sample in family.samples
        for label in sample.labels
    }
    assert labels == {"tier", "condition", "reason", "le"}
    assert text.count("\nbackstay_") <= 10 * len(TIERS)


@pytest.mark.parametrize("page", ["rest-api.md", "operations.md"])
def test_every_metric_has_its_unit_and_labels_in_the_docs(page: str) -> None:
    of_operator = page == "operations.md"
    rows = re.findall(
        r"^\| `(backstay_\w+)` \| (\w+) \| ([^|]+) \| ([^|]*) ?\|", docs(page), re.MULTILINE
    )
    told = {name: (kind, labels.replace("`", "").split()) for name, kind, _, labels in rows}
    assert all(unit.strip() for _, _, unit, _ in rows)
    known = {}
    for family in families():
        if family.name.startswith("backstay_operator_") == of_operator:
            ending = "_total" if family.type == "counter" else ""
            known[f"{family.name}{ending}"] = family.type
    assert {name: kind for name, (kind, _) in told.items()} == known


def docs(page: str) -> str:
    return (ROOT / "docs" / page).read_text(encoding="utf-8")


def test_every_alert_and_panel_reads_metrics_that_exist() -> None:
    used = {name for alert in alerts() for name in NAME.findall(alert["expr"])}
    used |= {name for expression in expressions() for name in NAME.findall(expression)}
    assert used - known() == set()


def test_the_dashboard_shows_every_metric_of_the_sidecars_and_the_operator() -> None:
    shown = {name for expression in expressions() for name in NAME.findall(expression)}
    assert known() - shown == set()


def test_panels_have_ids_of_their_own_and_fit_the_grid() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24


def test_every_alert_leads_to_a_heading_of_the_operations_page() -> None:
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    headings = {heading.lower() for heading in re.findall(r"^#+ (\w+)$", page, re.MULTILINE)}
    for alert in alerts():
        base, _, anchor = alert["annotations"]["runbook_url"].partition("#")
        assert base == "docs/operations.md"
        assert anchor in headings, alert["alert"]
        assert anchor == alert["alert"].lower()
        assert alert["labels"]["severity"] in ("warning", "critical")
        assert alert["annotations"]["summary"]
        assert alert["annotations"]["description"]


def test_runbooks_may_be_kept_elsewhere() -> None:
    values = {"metrics": {"prometheusRule": {"enabled": True, "runbookUrl": "https://wiki/x"}}}
    rule = the("PrometheusRule", objects(values))
    first = rule["spec"]["groups"][0]["rules"][0]
    assert first["annotations"]["runbook_url"] == "https://wiki/x#backstayoperatordown"


def test_sidecars_are_scraped_where_jobs_may_be() -> None:
    assert the("PodMonitor", objects(ON))["spec"]["namespaceSelector"] == {"any": True}
    limited = the("PodMonitor", objects({**ON, "namespaces": ["a"]}))
    assert limited["spec"]["namespaceSelector"] == {"matchNames": ["a"]}
    (endpoint,) = limited["spec"]["podMetricsEndpoints"]
    assert (endpoint["port"], endpoint["path"]) == ("health", "/metrics")
