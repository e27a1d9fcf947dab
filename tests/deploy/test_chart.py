"""Tests of the chart, rendered by Helm's own library and validated with published schemas."""

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
    """The validation that all other tests rely on rejects a wrong manifest."""
    for wrong in ("spec: {replica: 1}", "kind: Deploymint"):
        chart = tmp_path / wrong[:4]
        (chart / "templates").mkdir(parents=True)
        (chart / "Chart.yaml").write_text("apiVersion: v2\nname: wrong\nversion: 0.1.0\n")
        head = "apiVersion: apps/v1\nmetadata: {name: a}\n"
        kind = "" if wrong.startswith("kind") else "kind: Deployment\n"
        (chart / "templates" / "a.yaml").write_text(f"{head}{kind}{wrong}\n")
        rendered = render(tools, {}, chart)
        assert len(rendered["faults"]) == len(VERSIONS), rendered


def selects(selector: dict[str, Any] | None, labels: dict[str, str]) -> bool:
    """Return whether a label selector without expressions selects an object; an empty one does."""
    wanted = (selector or {}).get("matchLabels", {})
    return all(labels.get(key) == value for key, value in wanted.items())


def admits(policy: dict[str, Any], port: str, pod: dict[str, str], same_namespace: bool) -> bool:
    """Return whether a NetworkPolicy lets a pod connect to this port.

    Without `from` a rule admits everyone. A podSelector alone means pods of the policy's namespace;
    a namespaceSelector alone means all pods of the namespaces that it selects, here none or all.
    """
    for rule in policy["spec"]["ingress"]:
        if port not in [one["port"] for one in rule["ports"]]:
            continue
        if not rule.get("from"):
            return True
        for peer in rule["from"]:
            near = same_namespace or peer.get("namespaceSelector") == {}
            if near and "ipBlock" not in peer and selects(peer.get("podSelector"), pod):
                return True
    return False


FRIEND = {"app": "friend"}
FRIENDS = [{"podSelector": {"matchLabels": FRIEND}}]


@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize(
    ("peers", "near", "far", "friend"),
    [
        ([], True, False, True),
        ([{"namespaceSelector": {}}], True, True, True),
        (FRIENDS, False, False, True),
    ],
)
def test_the_network_policies_admit_the_peers_that_the_values_name_and_envoy(
    tools: Path, enabled: bool, peers: list[Any], near: bool, far: bool, friend: bool
) -> None:
    values = {"networkPolicy": {"from": peers}, "envoy": {"enabled": enabled}}
    resources = render(tools, values)["resources"]
    policies = {one["metadata"]["name"]: one for one in resources if one["kind"] == "NetworkPolicy"}
    pods = {
        one["metadata"]["name"]: one["spec"]["template"]
        for one in resources
        if one["kind"] == "Deployment"
    }
    assert policies.keys() == pods.keys()
    for name, pod in pods.items():
        (own,) = [
            other
            for other, policy in policies.items()
            if selects(policy["spec"]["podSelector"], pod["metadata"]["labels"])
        ]
        assert own == name
        named = {one["name"] for one in pod["spec"]["containers"][0]["ports"]}
        for port in named - {"metrics", "health"}:
            assert admits(policies[name], port, {}, same_namespace=True) == near
            assert admits(policies[name], port, {}, same_namespace=False) == far
            assert admits(policies[name], port, FRIEND, same_namespace=True) == friend
        assert not admits(policies[name], "health", {}, same_namespace=True)
    assert admits(policies["vision"], "metrics", {}, same_namespace=False)
    if enabled:
        labels = pods["vision-envoy"]["metadata"]["labels"]
        for port in ("http", "grpc"):
            assert admits(policies["vision"], port, labels, same_namespace=True)
        (to,) = policies["vision-envoy"]["spec"]["egress"][0]["to"]
        assert selects(to["podSelector"], pods["vision"]["metadata"]["labels"])


def test_kserves_runtime_has_the_deployments_options_probes_and_security(tools: Path) -> None:
    values = {"kserve": {"enabled": True}, "gpu": {"enabled": True}, "engine": {"max_num_seqs": 3}}
    resources = render(tools, values)["resources"]
    (runtime,) = [one["spec"] for one in resources if one["kind"] == "ServingRuntime"]
    (deployed,) = [
        one["spec"]["template"]["spec"] for one in resources if one["kind"] == "Deployment"
    ]
    (container,), (reference,) = runtime["containers"], deployed["containers"]
    assert {one["name"]: one["containerPort"] for one in container["ports"]} == {
        "http1": 8080,
        "h2c": 9000,
    }
    assert {"--options=/etc/vlora/model.json", "--http-port=8080", "--grpc-port=9000"} <= set(
        container["args"]
    )
    for name in ("startupProbe", "readinessProbe"):
        assert {**container[name], "httpGet": None} == {**reference[name], "httpGet": None}
        assert container[name]["httpGet"] == {"path": "/v2/health/ready", "port": 8080}
    command = reference["livenessProbe"]["exec"]["command"]
    assert container["livenessProbe"]["exec"]["command"] == [
        "localhost:9000" if word == "localhost:8001" else word for word in command
    ]
    pod = {key: value for key, value in deployed["securityContext"].items() if key != "fsGroup"}
    assert container["securityContext"] == {**reference["securityContext"], **pod}
    for key in ("resources", "volumeMounts"):
        assert container[key] == reference[key]
    assert runtime["volumes"] == deployed["volumes"]


def test_the_pool_points_at_the_gateway_beside_each_server(tools: Path) -> None:
    resources = render(tools, EVERYTHING)["resources"]
    (pool,) = [one["spec"] for one in resources if one["kind"] == "InferencePool"]
    pods = [one["spec"]["template"] for one in resources if one["kind"] == "Deployment"]
    (pod,) = [one for one in pods if selects(pool["selector"], one["metadata"]["labels"])]
    server, gateway = pod["spec"]["containers"]
    assert [one["number"] for one in pool["targetPorts"]] == [gateway["ports"][0]["containerPort"]]
    assert gateway["args"][0] == "gateway"
    probe = server["livenessProbe"]["exec"]["command"]
    assert [one for one in gateway["args"] if one.startswith("--tls")] == [
        one for one in probe if one.startswith("--tls")
    ]
    assert "--hand-over" in server["args"]


def test_a_digest_decides_the_image(tools: Path) -> None:
    digest = "sha256:" + "0" * 64
    resources = render(tools, {"image": {"digest": digest}})["resources"]
    (pod,) = [one["spec"]["template"]["spec"] for one in resources if one["kind"] == "Deployment"]
    assert pod["containers"][0]["image"].endswith(f"@{digest}")


@pytest.mark.parametrize(
    "values",
    [
        {"image": {"digest": "latest"}},
        {"kserve": {"ports": ["http"]}},
        {"replica": 2},
        {"probes": {"liveness": {"deadline": 3}}},
        {"tls": {"cert": "x"}},
        {"ports": {"http": 70000}},
        {"resources": {"limits": {"memory": "8 gigabytes"}}},
        {"checkpoint": {"source": "download"}},
        {"checkpoint": {"source": "claim"}},
        {"tls": {"enabled": True}},
        {"gateway": {"enabled": True}},
        {"inferencePool": {"enabled": True}},
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
