"""Renders the chart and validates what comes out; run by the checks' own Python, not by ours.

stdin: {"chart": DIR, "values": {...}, "namespace": NAME, "versions": ["1.33.0", …]}
stdout: {"error": WHY} where the chart refuses the values, else {"lint": [...], "notes": TEXT,
"resources": [...], "faults": [...], "custom": [kinds that Kubernetes itself does not know]}
"""

import json
import sys

import kubernetes_validate
import yaml
from helm_python.chart import Chart, lint
from helm_python.errors import HelmError
from kubernetes_validate.utils import VersionNotSupportedError


def main() -> None:
    asked = json.load(sys.stdin)
    chart = Chart.load(asked["chart"])
    try:
        chart.validate_schema(asked["values"])
        files = chart.render(asked["values"], name="vision", namespace=asked["namespace"])
        report = lint(asked["chart"], asked["values"], strict=True)
    except HelmError as error:
        json.dump({"error": str(error)}, sys.stdout)
        return
    notes = "".join(text for name, text in files.items() if name.endswith("NOTES.txt"))
    resources = [
        one
        for name, text in sorted(files.items())
        if not name.endswith("NOTES.txt")
        for one in yaml.safe_load_all(text)
        if one
    ]
    faults, custom = [], set()
    for one in resources:
        if "." in one["apiVersion"].partition("/")[0] and not known(one):
            custom.add(one["kind"])
            continue
        for version in asked["versions"]:
            try:
                kubernetes_validate.validate(one, version, strict=True)
            except (
                kubernetes_validate.ValidationError,
                kubernetes_validate.SchemaNotFoundError,
                VersionNotSupportedError,
            ) as error:
                message = getattr(error, "message", str(error))
                faults.append(f"{version}: {one['kind']} {one['metadata']['name']}: {message}")
    complaints = [one["error"] for one in report["messages"] if one["severity"] > 1]
    found = {"lint": complaints + report["errors"], "notes": notes, "resources": resources}
    json.dump({**found, "faults": faults, "custom": sorted(custom)}, sys.stdout, default=str)


def known(resource: dict) -> bool:
    """Whether its group is one of Kubernetes' own."""
    group = resource["apiVersion"].partition("/")[0]
    return group.endswith(".k8s.io") and not group.startswith("inference.")


main()
