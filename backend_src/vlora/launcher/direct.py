"""Requests to this machine, which no proxy may carry.

`http_proxy` and its relatives name proxies for other machines, but urllib and gRPC use them for
local addresses as well, unless `no_proxy` lists these.
"""

from __future__ import annotations

import ipaddress
import urllib.request

_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_BY_ENVIRONMENT = urllib.request.build_opener()


def is_local(host: str) -> bool:
    """Return whether a host, as in a URL, is this machine: `localhost` or a loopback address."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def grpc_options(host: str) -> tuple[tuple[str, int], ...]:
    """Return the options of a gRPC channel to `host`: without a proxy if it is local."""
    return (("grpc.enable_http_proxy", 0),) if is_local(host) else ()


def get(url: str, seconds: float, direct: bool) -> bytes:
    """Return the body of an HTTP answer.

    seconds: time limit of each blocking operation. direct: use no proxy.

    Raises OSError, which errors of HTTP are too.
    """
    opener = _DIRECT if direct else _BY_ENVIRONMENT
    with opener.open(url, timeout=seconds) as answer:
        return bytes(answer.read())
