"""The chart, rendered by Helm's own library and validated with published schemas."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft7Validator

from tests.support import deploy_kit as kit
from tests.support.chart import CHART, EVERYTHING, GATEWAY, TLS, VERSIONS, render
from vlora.launcher.probe import ENSEMBLE

VALUES: dict[str, dict[str, Any]] = {
    "cpu": {},
    "gpu": yaml.safe_load((CHART / "values-gpu.yaml").read_text()),
    "tls": {"tls": TLS},
    "gateway": GATEWAY,
    "gateway-tls": {**GATEWAY, "tls": TLS},
    "everything": EVERYTHING,
}
CUSTOM = {"PodMonitor", "PrometheusRule", "InferencePool", "ServingRuntime"}


def custom_resources(tools: Path) -> dict[str, dict[str, Any]]:
    resources = render(tools, EVERYTHING)["resources"]
    return {resource["kind"]: resource for resource in resources if resource["kind"] in CUSTOM}


@pytest.mark.parametrize("name", VALUES)
def test_the_chart_renders_and_validates_for_two_versions_of_kubernetes(
    tools: Path, name: str
) -> None:
    rendered = render(tools, VALUES[name])
    assert rendered.get("error") is None
    assert rendered["lint"] == []
    assert rendered["faults"] == []
    assert set(rendered["custom"]) <= CUSTOM
    kinds = {one["kind"] for one in rendered["resources"]}
    assert {"Deployment", "Service", "PodDisruptionBudget", "NetworkPolicy"} <= kinds
    assert f"{ENSEMBLE}/generate" in rendered["notes"]
    if name == "everything":
        assert {*CUSTOM, "HorizontalPodAutoscaler"} <= kinds


def test_the_validation_rejects_an_unknown_key_and_an_unknown_kind(
    tools: Path, tmp_path: Path
) -> None:
    """The check itself notices a wrong manifest."""
    for wrong in ("spec: {replica: 1}", "kind: Deploymint"):
        chart = tmp_path / wrong[:4]
        (chart / "templates").mkdir(parents=True)
        (chart / "Chart.yaml").write_text("apiVersion: v2\nname: wrong\nversion: 0.1.0\n")
        head = "apiVersion: apps/v1\nmetadata: {name: a}\n"
        kind = "" if wrong.startswith("kind") else "kind: Deployment\n"
        (chart / "templates" / "a.yaml").write_text(f"{head}{kind}{wrong}\n")
        rendered = render(tools, {}, chart)
        assert len(rendered["faults"]) == len(VERSIONS), rendered


@pytest.mark.parametrize(
    "values",
    [
        {"replica": 2},
        {"probes": {"liveness": {"deadline": 3}}},
        {"tls": {"cert": "x"}},
        {"ports": {"http": 70000}},
        {"resources": {"limits": {"memory": "8 gigabytes"}}},
        {"checkpoint": {"source": "download"}},
        {"checkpoint": {"source": "claim"}},
        {"tls": {"enabled": True}},
        {"envoy": {"enabled": True}, "service": {"headless": False}},
    ],
)
def test_invalid_values_are_rejected(tools: Path, values: dict[str, Any]) -> None:
    assert render(tools, values).get("error")


def test_monitors_and_rules_fit_the_schemas_of_the_prometheus_operator(tools: Path) -> None:
    folder = kit.npm(kit.MODELS_OF_PROMETHEUS)
    resources = custom_resources(tools)
    package = kit.MODELS_OF_PROMETHEUS.rpartition("@")[0]
    prefix = "ComGithubPrometheusOperatorPrometheusOperatorPkgApisMonitoringV1"
    for kind in ("PodMonitor", "PrometheusRule"):
        schema = folder / "node_modules" / package / "_schemas" / f"{prefix}{kind}.js"
        script = (
            f"import {{validate}} from {json.dumps(schema.as_uri())};"
            "import {readFileSync} from 'node:fs';"
            "for (const one of JSON.parse(readFileSync(0)))"
            " console.log(validate(one) ? 'valid' : JSON.stringify(validate.errors));"
        )
        wrong = {**resources[kind], "spec": 5}
        text = json.dumps([resources[kind], wrong])
        said = kit.output_of(["node", "--input-type=module", "-e", script], text).splitlines()
        assert said[0] == "valid", said[0]
        assert said[1] != "valid"


@pytest.mark.parametrize("kind", sorted(CUSTOM))
def test_a_custom_resource_fits_its_definition(tools: Path, kind: str) -> None:
    folder = os.environ.get("CRDS")
    if folder is None:
        pytest.skip("no package has the definitions; set CRDS=DIR to a folder with their YAML")
    resource = custom_resources(tools)[kind]
    definitions = [
        one
        for file in sorted(Path(folder).glob("*.yaml"))
        for one in yaml.safe_load_all(file.read_text())
        if one and one["spec"]["names"]["kind"] == kind
    ]
    assert definitions, f"no definition of {kind} in {folder}"
    version = resource["apiVersion"].partition("/")[2]
    (schema,) = (
        one["schema"]["openAPIV3Schema"]
        for one in definitions[0]["spec"]["versions"]
        if one["name"] == version
    )
    validator = Draft7Validator(strict(schema))
    assert [error.message for error in validator.iter_errors(resource)] == []
    assert list(validator.iter_errors({**resource, "spec": {**resource["spec"], "unknown": 1}}))


def strict(schema: Any) -> Any:
    """Return a structural schema that rejects fields which it does not name."""
    if isinstance(schema, list):
        return [strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    result = {key: strict(value) for key, value in schema.items() if key != "format"}
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    open_ended = schema.get("x-kubernetes-preserve-unknown-fields")
    if isinstance(schema.get("properties"), dict) and not open_ended:
        result.setdefault("additionalProperties", False)
    return result
