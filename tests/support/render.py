"""Render the chart and validate the result. The deployment checks run it in their own Python.

stdin: {"chart": DIR, "values": {...}, "namespace": NAME, "versions": ["1.33.0", …]}
stdout: {"error": REASON} if the chart rejects the values, else {"lint": [...], "notes": TEXT,
"resources": [...], "faults": [...], "custom": [kinds that are not Kubernetes' own]}
"""

import json
import sys

import kubernetes_validate
import yaml
from helm_python.chart import Chart, lint
from helm_python.errors import HelmError
from kubernetes_validate.utils import VersionNotSupportedError


def main() -> None:
    request = json.load(sys.stdin)
    chart = Chart.load(request["chart"])
    try:
        chart.validate_schema(request["values"])
        files = chart.render(request["values"], name="vision", namespace=request["namespace"])
        report = lint(request["chart"], request["values"], strict=True)
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
        if "." in one["apiVersion"].partition("/")[0] and not is_kubernetes_own(one):
            custom.add(one["kind"])
            continue
        for version in request["versions"]:
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
    result = {"lint": complaints + report["errors"], "notes": notes, "resources": resources}
    json.dump({**result, "faults": faults, "custom": sorted(custom)}, sys.stdout, default=str)


def is_kubernetes_own(resource: dict) -> bool:
    """Return whether the group of the resource is one of Kubernetes' own."""
    group = resource["apiVersion"].partition("/")[0]
    return group.endswith(".k8s.io") and not group.startswith("inference.")


main()
