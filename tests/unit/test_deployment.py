"""What images, chart, rules and dashboard say of the server is what the server has."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import typer

from tests.fakes import FakeRegistry
from vlora.cli import app
from vlora.metrics import EngineStats
from vlora.serving.error_counts import ErrorCounts, ErrorExporter
from vlora.serving.exporter import EncoderExporter, EngineExporter
from vlora.vision.features import Counters

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
COMMAND = typer.main.get_command(app)
METRIC = re.compile(r"\b(?:vllm|vlora):[a-z0-9_]+")
SERIES = re.compile(r"_(?:bucket|sum|count)$")
TRITON = ("--grpc-",)
"""Beginnings of options that are tritonserver's own."""


def options_of(command: str) -> set[str]:
    with typer.Context(COMMAND) as context:
        found = COMMAND.get_command(context, command)  # type: ignore[attr-defined]
    return {option for parameter in found.params for option in parameter.opts}


def metrics_of(text: str) -> set[str]:
    return {SERIES.sub("", name) for name in METRIC.findall(text)}


def exported() -> set[str]:
    """The names of all metrics that a server has."""
    registry = FakeRegistry()
    EngineExporter(registry, {}, EngineStats, max_lora=1, max_tokens=100).flush()
    EncoderExporter(registry, {}, Counters).flush()
    ErrorExporter(registry, {}, ErrorCounts()).flush()
    return {name for name, _ in registry.metrics}


@pytest.mark.parametrize("file", ["grafana/dashboard.json", "chart/files/alerts.yaml"])
def test_every_metric_that_is_asked_for_exists(file: str) -> None:
    asked = metrics_of((DOCKER / file).read_text())
    assert asked
    assert asked <= exported()


@pytest.mark.parametrize("file", ["deployment.yaml", "gateway.yaml"])
def test_every_option_in_the_chart_is_one_of_the_command_line(file: str) -> None:
    text = (DOCKER / "chart" / "templates" / file).read_text()
    used = set(re.findall(r"^\s+- (--[a-z-]+)", text, re.MULTILINE))
    ours = {option for option in used if not option.startswith(TRITON)}
    ours.discard("--")
    assert ours
    assert ours <= options_of("serve") | options_of("probe")


@pytest.mark.parametrize("file", ["Dockerfile", "Dockerfile.cpu"])
def test_the_images_start_and_probe_the_server_by_commands_that_exist(file: str) -> None:
    text = (DOCKER / file).read_text()
    lists = re.findall(r"(?:CMD|ENTRYPOINT) (\[.*\])", text)
    words = [json.loads(found) for found in lists]
    assert words == [
        ["vlora", "probe", "--alive", "--deadline", "10", "--metrics-port", "8002"],
        ["vlora"],
        ["serve", "--log", "-"],
    ]
    assert {"--alive", "--deadline", "--metrics-port"} <= options_of("probe")
    assert "--log" in options_of("serve")


def test_what_the_images_copy_is_there() -> None:
    for file in ("Dockerfile", "Dockerfile.cpu"):
        for line in re.findall(r"^COPY (?!--from)(.*)$", (DOCKER / file).read_text(), re.MULTILINE):
            for source in line.split()[:-1]:
                assert (ROOT / source).exists(), f"{file} copies {source}"


def test_the_pods_grace_is_longer_than_the_servers() -> None:
    values = (DOCKER / "chart" / "values.yaml").read_text()
    margin = re.search(r"^\s+margin: (\d+)", values, re.MULTILINE)
    assert margin is not None
    assert int(margin[1]) >= 15
