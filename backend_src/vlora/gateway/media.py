"""Images and videos of a request, from data URLs or http(s) URLs of hosts that the operator allows.

**Invariant:** files are fetched from public addresses only. The address is checked where the
connection is opened, so no host name can evade the check. Redirects are not followed.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import httpcore2

from vlora.base64_text import decode_base64
from vlora.errors import shown
from vlora.gateway.bodies import RETRY_SECONDS, Bodies, Held
from vlora.gateway.errors import ApiError, invalid
from vlora.gateway.messages import Media
from vlora.gateway.options import GatewayOptions
from vlora.request import FRAME_LIST

# Maximum number of connections for fetching files at the same time, and those of one tenant to one
# host, so that slow files delay nobody else's.
MAX_FETCHES, FETCH_SHARE = 64, 8
MAX_HEADER = 256  # Maximum number of characters of a data URL before its content.

# Default port of each scheme. Any other port must be allowed explicitly, as HOST:PORT.
PORTS = {"http": 80, "https": 443}
UNICAST6 = ipaddress.ip_network("2000::/3")  # Public unicast addresses of IPv6.


class PrivateAddress(Exception):
    """Raised if a host has an address that is not public."""


class MediaLoader:
    """Loads the images and videos of requests, in one event loop."""

    def __init__(self, options: GatewayOptions) -> None:
        self._options = options
        self._hosts = frozenset(host.lower() for host in options.image_hosts)
        self._pool = httpcore2.AsyncConnectionPool(
            max_connections=MAX_FETCHES, network_backend=PublicNetwork(), retries=0
        )
        # By tenant and host. Keys and the operator's list bound both.
        self._shares = defaultdict[tuple[str, str], asyncio.Semaphore](
            lambda: asyncio.Semaphore(FETCH_SHARE)
        )

    async def close(self) -> None:
        await self._pool.aclose()

    async def load(self, media: Sequence[Media], bodies: Bodies, held: Held) -> list[bytes]:
        """Return the encoded files of media. The fetched ones have `max_body_bytes` in total.
        Raises ApiError, which names the field or the host of an image that cannot be used.

        bodies: decodes data URLs. held: counts the bytes of fetched images.
        """
        files, left = [], self._options.max_body_bytes
        for one in media:
            if one.url[:5].lower() == "data:":
                read = partial(_decode, one.param)
                files.append(await bodies.parse(one.url, read, held.tenant))
            else:
                limit = min(left, self._options.max_fetch_bytes)
                files.append(await self._load(one, limit, held))
                left -= len(files[-1])
        return files

    async def _load(self, media: Media, limit: int, held: Held) -> bytes:
        url, host = _read_url(media)
        if host not in self._hosts:
            allowed = ", ".join(sorted(self._hosts)) or "none; send a data URL"
            refusal = f"files may not be fetched from {shown(host)}; --image-host allows: {allowed}"
            raise ApiError("PERMISSION_DENIED", refusal, media.param)
        share = self._shares[held.tenant, host]
        try:
            async with asyncio.timeout(self._options.fetch_seconds):
                await share.acquire()
        except TimeoutError:
            excess = f"more than {FETCH_SHARE} of your files are being fetched from {host!r}"
            reason = f"{excess}; try again later"
            raise ApiError("UNAVAILABLE", reason, retry_after=RETRY_SECONDS) from None
        try:
            async with asyncio.timeout(self._options.fetch_seconds):
                return await self._fetch(url, limit, media, held)
        except TimeoutError:
            reason = f"took more than {self._options.fetch_seconds:g} s"
        except PrivateAddress as error:
            raise ApiError("PERMISSION_DENIED", str(error), media.param) from None
        except (httpcore2.NetworkError, httpcore2.ProtocolError, OSError) as error:
            reason = f"cannot be fetched: {error}"
        finally:
            share.release()
        raise invalid(media.param, f"the {media.kind} of {host!r} {reason}")

    async def _fetch(self, url: httpcore2.URL, limit: int, media: Media, held: Held) -> bytes:
        content = bytearray()
        headers = [("accept", "image/*, video/*"), ("user-agent", "vlora-gateway")]
        async with self._pool.stream("GET", url, headers=headers) as response:
            if response.status != 200:
                answer = f"the {media.kind}'s host answered with status {response.status}"
                raise invalid(media.param, f"{answer} instead of 200; redirects are not followed")
            async for part in response.aiter_stream():
                held.add(len(part))
                content += part
                if len(content) > limit:
                    message = f"the {media.kind} has more than {limit} bytes, the limit"
                    raise invalid(media.param, message)
        return bytes(content)


def decode(media: Media) -> bytes:
    """Return the content of a data URL, or a list of frames. Raises ApiError."""
    return _decode(media.param, media.url)


def _decode(param: str, url: str) -> bytes:
    if url.startswith(FRAME_LIST):
        return url.encode(errors="replace")  # The server takes it as it is.
    comma = url.find(",", 0, MAX_HEADER)
    header = url[: max(comma, 0)]
    if not header.lower().endswith(";base64"):
        form = "base64, as in data:image/png;base64,iVBORw0…"
        raise invalid(param, f"'{param}' must be {form}")
    try:
        return decode_base64(url[comma + 1 :])
    except ValueError as error:
        raise invalid(param, f"'{param}' is not valid base64: {error}") from None


def _read_url(media: Media) -> tuple[httpcore2.URL, str]:
    # Returns the URL, and its host as in the list of allowed hosts. The URL is parsed only once, so
    # that the URL that is checked is the one that is fetched.
    try:
        parts = urlsplit(media.url)
        port = parts.port
    except ValueError as error:
        raise invalid(media.param, f"'{media.param}' is not a URL: {error}") from None
    if parts.scheme not in PORTS or not media.url.isascii():
        forms = "a data URL (data:image/png;base64,…) or an http(s) URL of ASCII characters"
        raise invalid(media.param, f"'{media.param}' must be {forms}")
    host = parts.hostname or ""
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    url = httpcore2.URL(scheme=parts.scheme, host=host, port=port, target=target)
    return url, host if port in (None, PORTS[parts.scheme]) else f"{host}:{port}"


class PublicNetwork(httpcore2.AsyncNetworkBackend):
    """Opens connections to public addresses only."""

    def __init__(self) -> None:
        self._backend = httpcore2.AnyIOBackend()

    async def connect_tcp(
        self, host: str, port: int, *args: Any, **kwargs: Any
    ) -> httpcore2.AsyncNetworkStream:
        """Return a connection to `host`, all of whose addresses must be public."""
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        addresses = [str(entry[4][0]) for entry in found]
        if not all(map(is_public, addresses)):
            refused = f"files may not be fetched from {host!r}"
            raise PrivateAddress(f"{refused}: its address is not public")
        return await self._backend.connect_tcp(addresses[0], port, *args, **kwargs)

    async def connect_unix_socket(self, *args: Any, **kwargs: Any) -> Any:
        """Raise PrivateAddress, because a URL must not name a socket of this machine."""
        raise PrivateAddress("images are not fetched from sockets of this machine")

    async def sleep(self, seconds: float) -> None:
        await self._backend.sleep(seconds)


# Networks of IANA's registries of special addresses that older versions of `ipaddress` lack.
SPECIAL = tuple(
    map(ipaddress.ip_network, ("192.0.0.0/24", "192.88.99.0/24", "3fff::/20", "5f00::/16"))
)


def is_public(address: str) -> bool:
    """Return whether an IP address belongs to the public Internet."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        # An address that contains an IPv4 address (mapped, 6to4, NAT64) is public if that one is.
        inner = ip.ipv4_mapped or ip.sixtofour
        if ip in ipaddress.ip_network("64:ff9b::/96"):
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(str(inner))
        if ip not in UNICAST6:
            return False
    if any(ip in network for network in SPECIAL if network.version == ip.version):
        return False
    return ip.is_global and not ip.is_multicast
