"""Tests of Prometheus with a real server: scraping, the rules, and the dashboard's queries."""

from __future__ import annotations

import json
import math
import re
import shutil
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support import deploy_kit as kit
from tests.support.gateway import running
from tests.support.polling import until
from tests.support.triton_client import Asker, Refused, picture
from vlora.launcher.repository import ServerOptions
from vlora.launcher.server import TritonServer

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
    """A client of a running Prometheus."""

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
        """Return the present value of every series of the query."""
        result = self.get("query", query=query)
        return [] if result is None else [float(one["value"][1]) for one in result["result"]]

    def firing(self) -> set[str]:
        alerts = (self.get("alerts") or {"alerts": []})["alerts"]
        return {one["labels"]["alertname"] for one in alerts if one["state"] == "firing"}


@contextmanager
def scraping(programs: Path, targets: list[str], folder: Path) -> Iterator[Prometheus]:
    """Run Prometheus with the configuration of compose and yield a client.

    It differs in the targets, in an interval of one second instead of five, and in alerts that fire
    without a delay.
    """
    config = yaml.safe_load(CONFIG.read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    (job,) = config["scrape_configs"]
    del job["dns_sd_configs"]
    job["static_configs"] = [{"targets": targets}]
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


def test_the_rules_and_the_configuration_are_valid(programs: Path, tmp_path: Path) -> None:
    kit.output_of([programs / "promtool", "check", "rules", ALERTS])
    (tmp_path / "alerts.yaml").write_text(ALERTS.read_text())
    (tmp_path / "prometheus.yaml").write_text(CONFIG.read_text())
    kit.output_of([programs / "promtool", "check", "config", tmp_path / "prometheus.yaml"])


def test_each_alert_fires_only_for_its_simulated_fault(programs: Path) -> None:
    rules = {one["alert"] for one in yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]}
    tried = {
        one["alertname"]
        for test in yaml.safe_load(FAULTS.read_text())["tests"]
        for one in test["alert_rule_test"]
        if one.get("exp_alerts")
    }
    assert tried == rules
    kit.output_of([programs / "promtool", "test", "rules", FAULTS])


def test_every_query_has_data_from_a_real_server_and_its_end_fires_an_alert(
    programs: Path, checkpoint: Path, adapters_dir: Path, tmp_path: Path
) -> None:
    adapters = Path(shutil.copytree(adapters_dir, tmp_path / "adapters"))
    (adapters / "broken").mkdir()
    (adapters / "broken" / "adapter_config.json").write_text("{")
    options = ServerOptions(model=checkpoint, adapters=adapters, log=tmp_path / "server.log")
    with TritonServer(options) as server:
        target = f"127.0.0.1:{server.options.metrics_port}"
        asker = Asker(server.grpc_url, server.http_url, server.metrics_url)
        with (
            running(server.grpc_url, tmp_path) as gateway,
            scraping(programs, [target, gateway.address], tmp_path) as prometheus,
        ):
            until(lambda: prometheus.values("up") == [1.0, 1.0])

            def queries_without_data() -> list[str]:
                """Send one request of each kind; return the queries that have no value yet."""
                for name in ("attention-r4", "all-r8"):
                    keys = {"lora_name": name, "max_tokens": 5, "ignore_eos": True}
                    asker.stream("lmm", text_input="hello", stream=True, sampling_parameters=keys)
                asker.once("video_analytics", text_input="?", image=picture())
                structure = {"structured_outputs": {"regex": "a{3}b"}}
                asker.stream("lmm", text_input="hello", sampling_parameters=structure)
                body = {"model": "base", "prompt": "hello", "max_tokens": 5}
                assert gateway.http("/v1/completions", json.dumps(body).encode())[0] == 200
                with pytest.raises(Refused):
                    asker.once("lmm_unary", text_input="?", sampling_parameters={"lora_name": "x"})
                results = {query: prometheus.values(query) for query in QUERIES}
                return [
                    query
                    for query, values in results.items()
                    if not values or any(math.isnan(value) for value in values)
                ]

            until(lambda: not queries_without_data())
            by_code = 'sum by (code) (vlora:request_errors_total{code="NOT_FOUND"})'
            until(lambda: sum(prometheus.values(by_code)) >= 1)
            until(lambda: prometheus.firing() == {"VloraBrokenAdapters"})
            asker.close()
            server.kill()
            until(lambda: "VloraDown" in prometheus.firing())
