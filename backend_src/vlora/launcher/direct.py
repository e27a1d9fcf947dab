"""HTTP and gRPC requests to this machine, without a proxy.

`http_proxy` and similar variables name proxies for other machines. But urllib and gRPC use them for
local addresses as well, unless `no_proxy` lists these.
"""

from __future__ import annotations

import ipaddress
import urllib.request
from http.client import HTTPException

_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_BY_ENVIRONMENT = urllib.request.build_opener()


def is_local(host: str) -> bool:
    """Return whether a host is this machine: `localhost` or a loopback address.

    host: as in a URL, so an IPv6 address is in brackets.
    """
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def grpc_options(host: str) -> tuple[tuple[str, int], ...]:
    """Return the options of a gRPC channel to `host`: no proxy if it is this machine."""
    return (("grpc.enable_http_proxy", 0),) if is_local(host) else ()


def get(url: str, seconds: float, direct: bool) -> bytes:
    """Return the body of the response to an HTTP GET.

    seconds: time limit of each blocking operation.
    direct: whether to use no proxy.

    Raises OSError, also for HTTP errors.
    """
    opener = _DIRECT if direct else _BY_ENVIRONMENT
    try:
        with opener.open(url, timeout=seconds) as answer:
            return bytes(answer.read())
    except HTTPException as error:
        raise OSError(f"the answer of {url} is not valid HTTP: {error!r}") from error
