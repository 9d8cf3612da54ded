"""The dashboard, the alerts and the scrape configurations use metrics and labels that exist."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from edl.metrics.job import JOB_METRICS
from edl.metrics.metric import Metric
from edl.metrics.node import NODE_METRICS

ROOT = Path(__file__).parents[4]
DASHBOARD = ROOT / "deploy" / "grafana" / "edl.json"
ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yml"
PAGE = ROOT / "docs" / "metrics.md"
METRICS: tuple[Metric[Any], ...] = (*JOB_METRICS, *NODE_METRICS)
LABELS = {metric.name: {"edl_job", *metric.labels} for metric in METRICS}


def needs_promtool() -> None:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus)")


def promtool(*arguments: str) -> None:
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def below(value: Any) -> Iterator[dict[str, Any]]:
    """All objects of a JSON document."""
    if isinstance(value, dict):
        yield value
        for one in value.values():
            yield from below(one)
    elif isinstance(value, list):
        for one in value:
            yield from below(one)


def dashboard() -> Any:
    return json.loads(DASHBOARD.read_text())


def of_dashboard() -> list[str]:
    return [one["expr"] for one in below(dashboard()) if "expr" in one]


def rules() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [
        rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]
    ]
    return found


@pytest.mark.parametrize("expression", [*of_dashboard(), *(rule["expr"] for rule in rules())])
def test_metrics_and_labels_exist(expression: str) -> None:
    names = re.findall(r"\bedl_(?!job\b)\w+", re.sub(r'"[^"]*"', '""', expression))
    assert names
    assert {*names} <= {*LABELS}
    for name, selector in re.findall(r"\b(edl_\w+)\{([^}]*)\}", expression):
        assert {*re.findall(r"(\w+)\s*[=!]~?\s*\"", selector)} <= LABELS[name]
    known = set.union(*(LABELS[name] for name in names)) | {"instance"}
    for grouping in re.findall(r"\b(?:by|on|group_left) \(([^)]*)\)", expression):
        assert {*re.split(r",\s*", grouping)} <= known


def test_expressions_of_the_dashboard_parse(tmp_path: Path) -> None:
    needs_promtool()
    plain = [
        one.replace("$__rate_interval", "5m").replace("$__interval", "1m").replace("$job", "train")
        for one in of_dashboard()
    ]
    recorded = [{"record": f"panel:{number}", "expr": one} for number, one in enumerate(plain)]
    page = tmp_path / "rules.yml"
    page.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": recorded}]}))
    promtool("check", "rules", str(page))


def test_the_dashboard_can_be_imported() -> None:
    """What Grafana's importer needs; Grafana itself is not there."""
    board = dashboard()
    assert board["id"] is None, "Grafana gives the number"
    assert (board["title"], board["schemaVersion"] >= 36, board["uid"]) == ("edl job", True, "edl-job")
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        own = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not own & cells, f"{panel['title']} is over another panel"
        cells |= own
        references = [target["refId"] for target in panel.get("targets", ())]
        assert len({*references}) == len(references)
    variables = {one["name"] for one in board["templating"]["list"]}
    sources = {one["datasource"]["uid"] for one in below(board) if isinstance(one.get("datasource"), dict)}
    assert sources == {"${datasource}", "-- Grafana --"}
    assert variables == {"datasource", "job"}
    assert all("$job" in one for one in of_dashboard())


def test_alerts_have_what_people_need() -> None:
    for rule in rules():
        assert rule["alert"].startswith("Edl")
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert "edl_job" in rule["annotations"]["summary"]
    needs_promtool()
    promtool("check", "rules", str(ALERTS))


def test_alerts_fire_when_they_should() -> None:
    needs_promtool()
    promtool("test", "rules", str(Path(__file__).with_name("alerts_test.yml")))


def test_the_scrape_configurations_are_valid(tmp_path: Path) -> None:
    needs_promtool()
    blocks = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 2
    (tmp_path / "token").write_text("a-token")
    for number, block in enumerate(blocks):
        config = tmp_path / f"{number}.yml"
        here = re.sub(r"credentials_file: [^}]*", f"credentials_file: {tmp_path / 'token'}", block)
        # Debian's promtool is built without the discovery of Kubernetes.
        here = re.sub(r"    kubernetes_sd_configs:\n(?:      .*\n)+", "", here)
        config.write_text(here.replace("/etc/prometheus/edl/alerts.yml", str(ALERTS)))
        promtool("check", "config", str(config))
