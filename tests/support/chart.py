"""The Helm chart, rendered with given values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support import deploy_kit as kit

CHART = kit.DOCKER / "chart"
VERSIONS = ["1.33.0", "1.37.0"]
"""Versions of Kubernetes whose schemas the resources must match."""

TLS = {"enabled": True, "secret": "certificates", "clientCa": "clients.crt"}
GATEWAY = {
    "envoy": {"enabled": True},
    "gateway": {"enabled": True, "keysSecret": "keys"},
    "inferencePool": {"enabled": True},
}
EVERYTHING = {
    **GATEWAY,
    "kserve": {"enabled": True},
    "tls": TLS,
    "autoscaling": {"enabled": True},
    "monitoring": {"podMonitor": True, "rules": True},
    "checkpoint": {"source": "claim", "claim": "llava", "subPath": "7b"},
    "adapters": {"source": "ociImage", "reference": "registry.example/adapters:1"},
    "engine": {"kv_cache_tokens": 65536},
    "priorityClassName": "high",
    "podAnnotations": {"a": "b"},
    "podLabels": {"team": "vision"},
    "nodeSelector": {"kind": "big"},
    "image": {"pullSecrets": [{"name": "key"}]},
    "networkPolicy": {"from": [{"podSelector": {}}], "metricsFrom": [{"namespaceSelector": {}}]},
}
"""Values that turn on every feature of the chart."""


def render(tools: Path, values: dict[str, Any], chart: Path = CHART) -> dict[str, Any]:
    """Return the output of `render.py` for the chart with these values.

    tools: folder that `deploy_kit.pypi` returns.
    """
    request = {"chart": str(chart), "values": values, "namespace": "shop", "versions": VERSIONS}
    script = Path(__file__).with_name("render.py")
    result: dict[str, Any] = json.loads(
        kit.output_of([tools / "python", script], json.dumps(request))
    )
    return result
