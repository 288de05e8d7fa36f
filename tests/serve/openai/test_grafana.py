"""The dashboard in configs/grafana.json: every metric that it names is there, and its panels do not overlap."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

pytestmark = pytest.mark.anyio
DASHBOARD: dict[str, Any] = json.loads((Path(__file__).parents[3] / "configs" / "grafana.json").read_text())
EXPRESSIONS = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
ENGINE = re.compile(r"sgray:(engine_|kv_|num_running|num_queue|token_usage|last_step|max_total|num_used)")


async def test_every_metric_of_the_dashboard_exists_with_the_labels_that_it_is_grouped_by(api):
    await api.post("/v1/completions")
    families = text_string_to_metric_families((await api.http.get("/metrics")).text)
    labels = {sample.name: set(sample.labels) for family in families for sample in family.samples}
    asked = {name for expression in EXPRESSIONS for name in re.findall(r"sgray:\w+", expression)}
    assert len(asked) > 20 and asked <= labels.keys()
    for expression in EXPRESSIONS:
        grouped = set(re.findall(r"by \((\w+)\)", expression))
        for name in re.findall(r"sgray:\w+", expression):
            assert grouped <= labels[name], expression


def test_counters_are_shown_as_rates_and_gauges_as_they_are() -> None:
    for expression in EXPRESSIONS:
        for name in re.findall(r"sgray:\w+", expression):
            is_counted = name.endswith(("_total", "_bucket"))
            assert is_counted == (f"rate({name}[" in expression), expression


def test_what_every_ingress_repeats_is_not_summed_over_ingresses() -> None:
    for expression in EXPRESSIONS:
        if ENGINE.search(expression):
            assert "max by (replica)" in expression, expression
        else:
            assert "sum" in expression, expression


def test_every_legend_names_a_label_that_is_left() -> None:
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            named = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            assert named <= set(re.findall(r"by \((\w+)\)", target["expr"])), panel["title"]


def test_the_data_source_is_chosen_by_whoever_imports_it_and_panels_lie_side_by_side() -> None:
    panels = DASHBOARD["panels"]
    (variable,) = DASHBOARD["templating"]["list"]
    assert (variable["name"], variable["type"]) == ("datasource", "datasource")
    for panel in panels:
        assert panel["datasource"]["uid"] == "${datasource}"
        assert all(target["datasource"]["uid"] == "${datasource}" for target in panel["targets"])
    assert len({panel["id"] for panel in panels}) == len({panel["title"] for panel in panels}) == len(panels)
    places = [(place["x"], place["y"]) for place in (panel["gridPos"] for panel in panels)]
    assert len(set(places)) == len(places) and all(x in (0, 12) and y % 8 == 0 for x, y in places)
