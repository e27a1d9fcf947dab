"""Prometheus over a real server: it scrapes, its rules fire, the dashboard's queries have data."""

from __future__ import annotations

import json
import math
import re
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support import deploy_kit as kit
from tests.support.polling import until
from tests.support.triton_client import Asker, Refused, picture
from vlora.launcher.server import ServerOptions, TritonServer

ALERTS = kit.DOCKER / "chart" / "files" / "alerts.yaml"
CONFIG = kit.DOCKER / "prometheus" / "prometheus.yaml"
FAULTS = kit.DOCKER / "prometheus" / "alerts.test.yaml"
DASHBOARD = kit.DOCKER / "grafana" / "dashboard.json"
QUERIES = [
    target["expr"]
    for panel in json.loads(DASHBOARD.read_text())["panels"]
    for target in panel["targets"]
]


@pytest.fixture(scope="module")
def programs() -> Path:
    return kit.debian("prometheus") / "usr" / "bin"


class Prometheus:
    """Asks a running one."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/api/v1"

    def get(self, what: str, **parameters: str) -> Any:
        query = urllib.parse.urlencode(parameters)
        try:
            with urllib.request.urlopen(f"{self._url}/{what}?{query}", timeout=10) as answer:
                return json.load(answer)["data"]
        except OSError:
            return None

    def values(self, query: str) -> list[float]:
        """Of every series that the query has now."""
        found = self.get("query", query=query)
        return [] if found is None else [float(one["value"][1]) for one in found["result"]]

    def firing(self) -> set[str]:
        alerts = (self.get("alerts") or {"alerts": []})["alerts"]
        return {one["labels"]["alertname"] for one in alerts if one["state"] == "firing"}


@contextmanager
def scraping(programs: Path, target: str, folder: Path) -> Iterator[Prometheus]:
    """Prometheus with the config of compose, but for the target, one second instead of five, and
    alerts that wait for nothing."""
    config = yaml.safe_load(CONFIG.read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["scrape_configs"][0]["static_configs"][0]["targets"] = [target]
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    (rules,) = config["rule_files"]
    text = re.sub(r"^( +for:) \w+$", r"\1 0s", ALERTS.read_text(), flags=re.MULTILINE)
    (folder / rules).write_text(text)
    (port,) = kit.free_ports("http_port").values()
    command = [
        programs / "prometheus",
        f"--config.file={folder / 'prometheus.yaml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with kit.running(command, folder / "prometheus.log"):
        yield Prometheus(port)


def test_the_rules_and_the_config_are_sound(programs: Path, tmp_path: Path) -> None:
    kit.output_of([programs / "promtool", "check", "rules", ALERTS])
    (tmp_path / "alerts.yaml").write_text(ALERTS.read_text())
    (tmp_path / "prometheus.yaml").write_text(CONFIG.read_text())
    kit.output_of([programs / "promtool", "check", "config", tmp_path / "prometheus.yaml"])


def test_every_alert_fires_on_its_made_up_fault_and_on_no_other(programs: Path) -> None:
    rules = {one["alert"] for one in yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]}
    tried = {
        one["alertname"]
        for test in yaml.safe_load(FAULTS.read_text())["tests"]
        for one in test["alert_rule_test"]
        if one.get("exp_alerts")
    }
    assert tried == rules
    kit.output_of([programs / "promtool", "test", "rules", FAULTS])


def test_a_real_server_is_scraped_every_query_has_data_and_its_end_fires_an_alert(
    programs: Path, checkpoint: Path, adapters_dir: Path, tmp_path: Path
) -> None:
    options = ServerOptions(model=checkpoint, adapters=adapters_dir, log=tmp_path / "server.log")
    with TritonServer(options) as server:
        target = f"127.0.0.1:{server.options.metrics_port}"
        asker = Asker(server.grpc_url, server.http_url, server.metrics_url)
        with scraping(programs, target, tmp_path) as prometheus:
            until(lambda: prometheus.values("up") == [1.0])

            def asked_and_answered() -> list[str]:
                """One of each kind of request; the queries that have no figure yet."""
                for name in ("attention-r4", "all-r8"):
                    keys = {"lora_name": name, "max_tokens": 5, "ignore_eos": True}
                    asker.stream("lmm", text_input="hello", stream=True, sampling_parameters=keys)
                asker.once("video_analytics", text_input="?", image=picture())
                with pytest.raises(Refused):
                    asker.once("lmm_unary", text_input="?", sampling_parameters={"lora_name": "x"})
                found = {query: prometheus.values(query) for query in QUERIES}
                return [
                    query
                    for query, values in found.items()
                    if not values or any(math.isnan(value) for value in values)
                ]

            until(lambda: not asked_and_answered())
            by_code = 'sum by (code) (vlora:request_errors_total{code="NOT_FOUND"})'
            until(lambda: sum(prometheus.values(by_code)) >= 1)
            assert prometheus.firing() == set()
            asker.close()
            server.kill()
            until(lambda: "VloraDown" in prometheus.firing())
