# SPDX-License-Identifier: Apache-2.0
"""What Prometheus and Grafana make of lbproxy's metrics: each rule and each panel asks for what a live page has.

A metric or label that is spelt wrong is no error there: it is an alert that never fires, and an empty panel.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from lbproxy.core.endpoints.health import Health
from lbproxy.core.sleeping.phase import Phase
from tests.support.aio import run, until
from tests.support.compose import BASE, PROMETHEUS, project
from tests.support.docs import DOCS, ROOT, families
from tests.support.process import lbproxy, mock
from tests.support.promql import asked

RULES = ROOT / "deploy/prometheus/lbproxy.rules.yml"
PANELS = ROOT / "deploy/grafana/lbproxy.json"
PROVISIONING = ROOT / "deploy/grafana/provisioning"

SCRAPED = {"job", "instance"}
"""Labels that Prometheus puts to all that it scrapes."""
OWN = {"up": SCRAPED, "ALERTS": {"alertname", "alertstate", "severity", "endpoint", *SCRAPED}}
"""Prometheus' own series."""
DOLLARS = {"$job": "lbproxy", "$endpoint": ".*", "$__rate_interval": "1m"}

ALONE = "replicas: {url: 'redis://127.0.0.1:9/0'}"
"""With families of replicas, of which it finds none."""

Fields = dict[str, Any]


def rules(kind: str) -> dict[str, Fields]:
    """Those that record, or alert, by name."""
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return {rule[kind]: rule for group in groups for rule in group["rules"] if kind in rule}


def dashboard() -> Fields:
    return dict(json.loads(PANELS.read_text(encoding="utf-8")))


def queries() -> Iterator[tuple[str, str, str]]:
    """Of each panel: its title, a query with the variables filled in, and what its legend says."""
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", []):
            expression = target["expr"]
            for name, value in DOLLARS.items():
                expression = expression.replace(name, value)
            assert "$" not in expression, expression
            yield panel["title"], expression, target["legendFormat"]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Names of series on a live page, each with its labels; of families without a sample, what the docs say."""
    with (
        mock("--speed", "50") as (_, server),
        lbproxy(tmp_path_factory.mktemp("page"), [server, "http://127.0.0.1:9"], ALONE) as (_, url, admin),
    ):
        run(until(lambda: httpx.get(f"{admin}/readyz").status_code == 200, "an endpoint is up"))
        for stream in (True, False):
            body = {"model": "sim", "prompt": "x", "max_tokens": 2, "stream": stream}
            assert httpx.post(f"{url}/v1/completions", json=body, timeout=30).status_code == 200
        text = httpx.get(f"{admin}/metrics").text
    documented = {family.name: family for family in families("families")}
    found: defaultdict[str, set[str]] = defaultdict(set)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name] |= {*sample.labels, *SCRAPED}
        name = f"{family.name}_total" if family.type == "counter" else family.name
        if not family.samples and name in documented:
            found[name] |= {*documented[name].labels, *SCRAPED}
    for one in families("families of replicas"):
        if one.labels == ["replica"]:  # of another one, and there is none
            found[one.name] |= {"replica", *SCRAPED}
    for one in (one for what in ("split requests", "tiers", "sleep") for one in families(f"families of {what}")):
        for suffix in ("_bucket", "_sum", "_count") if one.is_histogram else ("",):
            found[one.name + suffix] |= {*one.labels, *SCRAPED} | ({"le"} if suffix == "_bucket" else set())
    return dict(found)


def unknown(expression: str, known: dict[str, set[str]]) -> list[str]:
    """What the expression asks for and is not there."""
    said = asked(expression)
    wrong = [f"there is no {name}" for name in said.metrics if name not in known]
    for name, labels in said.metrics.items():
        wrong += [f"{name} has no {label}" for label in labels - known.get(name, labels)]
    labels = set().union(*(known.get(name, set()) for name in said.metrics))
    return wrong + [f"nothing in it has the label {label}" for label in said.grouped - labels]


def known(page: dict[str, set[str]]) -> dict[str, set[str]]:
    """What rules and panels may ask for: also what rules record."""
    recorded = {name: asked(rule["expr"]).grouped for name, rule in rules("record").items()}
    return page | OWN | recorded


def test_every_rule_asks_for_what_is_there(page: dict[str, set[str]]) -> None:
    every = rules("record") | rules("alert")
    assert len(every) > 20
    assert {name: wrong for name, rule in every.items() if (wrong := unknown(rule["expr"], known(page)))} == {}


def test_every_panel_asks_for_what_is_there(page: dict[str, set[str]]) -> None:
    panels = list(queries())
    assert len(panels) > 30
    wrong = {f"{title}: {one}" for title, query, _ in panels for one in unknown(query, known(page))}
    assert wrong == set()
    for title, query, legend in panels:
        said = asked(query)
        labels = said.grouped or set().union(*(known(page)[name] for name in said.metrics))
        assert set(re.findall(r"{{(\w+)}}", legend)) <= labels, f"{title}: {legend}"


def test_the_panels_of_states_know_every_state() -> None:
    """A state that is not asked for is a gap in the panel."""
    for title, states in (("Health", Health), ("Sleep", Phase)):
        (panel,) = [one for one in dashboard()["panels"] if one["title"] == title]
        (query,) = [target["expr"] for target in panel["targets"]]
        asked_for = re.findall(r'(\d) \* \(\w+{[^}]*state="(\w+)"} == 1\)', query)
        assert {name for _, name in asked_for} == {one.value for one in states}
        shown = panel["fieldConfig"]["defaults"]["mappings"][0]["options"]
        assert {number: one["text"].replace(" ", "_") for number, one in shown.items()} == dict(asked_for)


def test_what_is_not_there_is_found(page: dict[str, set[str]]) -> None:
    """The two tests above are worth nothing if they see nothing."""
    assert unknown("lbproxy_endpoint_uq", page) == ["there is no lbproxy_endpoint_uq"]
    assert unknown('sum by (job) (rate(lbproxy_requests_total{outcom="x"}[5m]))', page) == [
        "lbproxy_requests_total has no outcom"
    ]
    assert unknown("sum by (modell) (lbproxy_waiting_requests)", page) == ["nothing in it has the label modell"]
    with pytest.raises(ValueError, match="unclosed left parenthesis"):
        asked("sum by (x (y)")


def test_variables_and_annotations_too(page: dict[str, set[str]]) -> None:
    shown = dashboard()
    for variable in shown["templating"]["list"]:
        if variable["type"] == "query":
            match = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]["query"])
            assert match is not None
            assert unknown(match[1].replace("$job", "lbproxy"), page) == []
            assert match[2] in page[re.split(r"\W", match[1])[0]]
    for annotation in shown["annotations"]["list"]:
        assert unknown(annotation["expr"], known(page)) == []


def test_the_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    identifiers = [panel["id"] for panel in dashboard()["panels"]]
    assert len(identifiers) == len(set(identifiers))
    for panel in dashboard()["panels"]:
        at = panel["gridPos"]
        mine = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not mine & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= mine


def test_compose_gives_prometheus_the_rules_and_grafana_the_dashboard() -> None:
    services = project(BASE).services
    assert ROOT / services["prometheus"].mounts["/etc/prometheus/lbproxy.rules.yml"] == RULES
    assert yaml.safe_load(PROMETHEUS.read_text())["rule_files"] == ["/etc/prometheus/lbproxy.rules.yml"]
    mounts = services["grafana"].mounts
    assert ROOT / mounts["/etc/grafana/provisioning"] == PROVISIONING
    (provider,) = yaml.safe_load((PROVISIONING / "dashboards/lbproxy.yml").read_text())["providers"]
    shown = f"{provider['options']['path']}/lbproxy.json"
    assert ROOT / mounts[shown] == PANELS
    assert f"GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH={shown}" in services["grafana"].environment
    (source,) = yaml.safe_load((PROVISIONING / "datasources/prometheus.yml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    scraped = yaml.safe_load(PROMETHEUS.read_text())["global"]["scrape_interval"]
    assert source["jsonData"]["timeInterval"] == scraped


def test_each_alert_has_its_place_in_the_run_book() -> None:
    book = (DOCS / "operations.md").read_text(encoding="utf-8").partition("\n## Alerts\n")[2].partition("\n## ")[0]
    described = re.findall(r"^- \*\*(\w+)\*\*: ", book, re.MULTILINE)
    assert described == list(rules("alert"))
