"""Addresses, ports and local requests of servers, for the launcher and its clients."""

from __future__ import annotations

import errno
import importlib
import importlib.util
import ipaddress
import random
import re
import resource
import secrets
import socket
import struct
import sys
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from http.client import HTTPException
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import quote

from vlora.errors import ServerError

# `http_proxy` and similar variables name proxies for other machines. But urllib and gRPC use them
# for local addresses as well, unless `no_proxy` lists these.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_BY_ENVIRONMENT = urllib.request.build_opener()


# Open files that a server with a few connections needs, and that are enough for any.
MIN_FILES, MAX_FILES = 256, 65_536


def raise_file_limit() -> None:
    """Raise the limit of open files, which the usual 1,024 connections would reach, if allowed.

    Raises ServerError if the system allows fewer than MIN_FILES.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = MAX_FILES if hard == resource.RLIM_INFINITY else min(MAX_FILES, hard)
    if allowed < MIN_FILES:
        raise ServerError(
            f"this process may open {hard} files (ulimit -Hn); a server needs {MIN_FILES}, and one"
            " more for each connection"
        )
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


def is_local(host: str) -> bool:
    """Return whether the host of a URL is this machine: `localhost` or a loopback address."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


@dataclass(frozen=True)
class Tls:
    """PEM files for a connection with TLS; key and certificate of the client for mutual TLS.

    name: name in the server's certificate, if it differs from the host.
    """

    ca: Path
    name: str | None = None
    key: Path | None = None
    certificate: Path | None = None

    def credentials(self) -> Any:
        """Return gRPC's credentials of a channel. Raises OSError if a file cannot be read."""
        import grpc

        files = (self.ca, self.key, self.certificate)
        contents = (None if file is None else file.read_bytes() for file in files)
        return grpc.ssl_channel_credentials(*contents)


def grpc_options(address: str, tls: Tls | None = None) -> tuple[tuple[str, int | str], ...]:
    """Return the options of a gRPC channel: no proxy if the address is on this machine, and in turn
    all addresses of a name after `dns:///`.
    """
    options: list[tuple[str, int | str]] = []
    if is_local(address.removeprefix("dns:///").rpartition(":")[0]):
        options.append(("grpc.enable_http_proxy", 0))
    if address.startswith(("dns:", "ipv4:")):
        options.append(("grpc.lb_policy_name", "round_robin"))
    if tls is not None and tls.name is not None:
        options.append(("grpc.ssl_target_name_override", tls.name))
    return tuple(options)


def aio_channel(address: str, tls: Tls | None, options: Sequence[tuple[str, int]] = ()) -> Any:
    """Return an asynchronous gRPC channel. Unless `options` do, other code limits its messages."""
    import grpc.aio

    sizes = (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1))
    every = (*options, *sizes, *grpc_options(address, tls))  # The first value of a key counts.
    if tls is None:
        return grpc.aio.insecure_channel(address, every)
    return grpc.aio.secure_channel(address, tls.credentials(), every)


# Header by which Envoy selects one of several servers.
ROUTING_HEADER = "x-lora-adapter"
MAX_ROUTED = 256  # Characters of each part of its value: those of the longest valid `stream_id`.


def routing_headers(adapter: object, stream_id: object = None) -> tuple[tuple[str, str], ...]:
    """Return the header by which Envoy selects a server: the adapter, with the stream if any.

    An adapter is loaded by one server then, and all chunks of a camera reach one, where a newer one
    supersedes those before it. Values may have any type, since the server checks them.
    """
    if not (adapter or stream_id):
        return ()
    # gRPC refuses headers of more than 16 KiB. A character takes up to 12 bytes here.
    texts = ("" if part is None else str(part)[:MAX_ROUTED] for part in (adapter, stream_id))
    return ((ROUTING_HEADER, "/".join(quote(text, safe="") for text in texts).rstrip("/")),)


# Pattern of a gRPC address, HOST:PORT or dns:///HOST:PORT. Its group matches the port.
GRPC_ADDRESS = re.compile(r"(?:dns:///)?[^/\s]+:(\d{1,5})")

# Text of gRPC's errors when the port belongs to an HTTP/1 server, such as Triton's.
NOT_GRPC = re.compile("Failed parsing HTTP/2|Socket closed")


def port_hint(details: str) -> str:
    """Return a question to append to gRPC's error `details` if the port is not gRPC's."""
    return "; is this the gRPC port?" if NOT_GRPC.search(details) else ""


def get(url: str, seconds: float, direct: bool) -> bytes:
    """Return the body of the response to an HTTP GET. Raises OSError, also for HTTP errors.

    seconds: time limit of each blocking operation.
    direct: whether to use no proxy.
    """
    opener = _DIRECT if direct else _BY_ENVIRONMENT
    try:
        with opener.open(url, timeout=seconds) as answer:
            return bytes(answer.read())
    except HTTPException as error:
        raise OSError(f"the answer of {url} is not valid HTTP: {error!r}") from error


PACKAGE = "tritonclient.grpc"


def load_grpc_stubs() -> tuple[ModuleType, ModuleType]:
    """Return tritonclient's modules `service_pb2` and `service_pb2_grpc`. Raises
    ModuleNotFoundError.
    """
    # The package imports numpy for its client, which takes more processor time than the rest of
    # `vlora probe`. So an empty package takes its place while its generated modules are imported.
    stand_in = None
    if PACKAGE not in sys.modules:
        spec = importlib.util.find_spec(PACKAGE)
        if spec is None or spec.submodule_search_locations is None:
            remedy = "install it with: pip install 'vlora[server]'"
            raise ModuleNotFoundError(f"{PACKAGE} is not installed; {remedy}")
        stand_in = ModuleType(PACKAGE)
        stand_in.__path__ = list(spec.submodule_search_locations)
        sys.modules[PACKAGE] = stand_in
    try:
        messages = importlib.import_module(f"{PACKAGE}.service_pb2")
        return messages, importlib.import_module(f"{PACKAGE}.service_pb2_grpc")
    finally:
        if stand_in is not None:
            del sys.modules[PACKAGE]


def string_parts(values: Iterable[bytes]) -> list[bytes]:
    """Return the parts of a BYTES tensor in Triton's encoding: each value's length, then itself."""
    return [part for value in values for part in (struct.pack("<I", len(value)), value)]


def add_strings(request: Any, tensors: Mapping[str, Sequence[bytes]]) -> None:
    """Add inputs of type BYTES to a `ModelInferRequest`, but those without values."""
    for name, values in tensors.items():
        if values:
            request.inputs.add(name=name, datatype="BYTES", shape=[len(values)])
            request.raw_input_contents.append(b"".join(string_parts(values)))


def outputs_of(response: Any) -> dict[str, list[Any]]:
    """Return the values of the outputs of a `ModelInferResponse`, by name."""
    raws = zip(response.outputs, response.raw_output_contents, strict=True)
    return {output.name: _values(output.datatype, raw) for output, raw in raws}


def _values(datatype: str, raw: bytes) -> list[Any]:
    if datatype == "BYTES":
        texts, start = [], 0
        while start < len(raw):
            end = start + 4 + int.from_bytes(raw[start : start + 4], "little")
            texts.append(raw[start + 4 : end].decode())
            start = end
        return texts
    kind = {"UINT32": "I", "FP32": "f"}[datatype]
    return list(struct.unpack(f"<{len(raw) // 4}{kind}", raw))


LOOPBACK = "127.0.0.1"

# Protocols of Triton that let any client load models, write files or change the log.
CLOSED = ("model-repository", "trace", "logging")

# Through shared memory that it registers, a client can read and write everything that the server
# can open, including other clients' requests.
SHARED_MEMORY = "shared-memory"
RESTRICTIONS = ("--http-restricted-api", "--grpc-restricted-protocol")
HEADER = "vlora-closed"


def check_host(host: str) -> None:
    """Raise ServerError unless `host` is an IP address."""
    # With a host name, Triton 2.51 opens all ports but gRPC's on 255.255.255.255.
    try:
        ipaddress.ip_address(host)
    except ValueError:
        remedy = f"use {LOOPBACK} for clients on this machine, 0.0.0.0 for all networks"
        reason = f"is not an IP address; {remedy}, or the address of one interface"
        raise ServerError(f"--host {host} {reason}") from None


def check_keys(host: str, keys: Path | None, option: str) -> None:
    """Raise ServerError if a gateway on this IP address is open to a network and has no keys.
    `option` is the name of the option for the file of keys.
    """
    if keys is None and not ipaddress.ip_address(host).is_loopback:
        remedy = f"name a file with {option} (a line 'TENANT KEY' for each key)"
        reason = "opens the gateway to a network, which needs API keys"
        raise ServerError(f"--host {host} {reason}; {remedy}")


def reachable_host(host: str) -> str:
    """Return the host part of a local URL of a server that listens on `host`."""
    address = ipaddress.ip_address(host)
    if address.version == 4:
        return LOOPBACK if address.is_unspecified else host
    return "[::1]" if address.is_unspecified else f"[{host}]"


def listen_arguments(host: str, ports: Mapping[str, int]) -> list[str]:
    """Return Triton's arguments for its listeners `http`, `grpc` and `metrics` on an IP address."""
    is_v6 = ":" in host
    addresses = dict.fromkeys(ports, f"ipv6:{host}" if is_v6 else host)
    addresses["grpc"] = f"[{host}]" if is_v6 else host
    return [
        argument
        for name, port in ports.items()
        for argument in (f"--{name}-address={addresses[name]}", f"--{name}-port={port}")
    ]


def closing_arguments(allow_shared_memory: bool, given: Sequence[str]) -> list[str]:
    """Return the arguments with which Triton closes protocols over HTTP and gRPC, except for those
    that the operator's own arguments, `given`, restrict.
    """
    # A closed protocol requires a header with a random value that is stored nowhere.
    closed = CLOSED if allow_shared_memory else (SHARED_MEMORY, *CLOSED)
    arguments = []
    for option in RESTRICTIONS:
        restricted = _restricted_by(option, given)
        if names := [name for name in closed if name not in restricted]:
            arguments.append(f"{option}={','.join(names)}:{HEADER}={secrets.token_hex(32)}")
    return arguments


def _restricted_by(option: str, given: Sequence[str]) -> set[str]:
    # The arguments have the form `OPTION=NAME,…:KEY=VALUE` or `OPTION NAME,…:KEY=VALUE`.
    values = [word.removeprefix(f"{option}=") for word in given if word.startswith(f"{option}=")]
    values += [value for word, value in pairwise(given) if word == option]
    return {name.strip() for value in values for name in value.partition(":")[0].split(",")}


MAX_PORT = 65535
# File with the first and the last of the kernel's ephemeral ports.
EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
# Ports from which a free one is chosen. Only those below the ephemeral ports are used.
FREE_PORTS = range(20000, 30000)
TRIES = 100  # Maximum number of ports in FREE_PORTS that are tried.


def choose_ports(requested: Mapping[str, int], host: str = "0.0.0.0") -> dict[str, int]:
    """Return different free ports by name (such as `http_port`); a requested 0 chooses one. Raises
    ServerError, which names the option of the wrong address or port.
    """
    check_ports(requested)
    with ExitStack() as stack:
        # All sockets are open at the same time, so that no free port is chosen twice.
        return {name: _bind(stack, host, name, port) for name, port in requested.items()}


def check_ports(requested: Mapping[str, int]) -> None:
    """Raise ServerError if a number is neither a port nor 0, or if two ports are equal."""
    for name, port in requested.items():
        if not 0 <= port <= MAX_PORT:
            remedy = f"choose one from 1 to {MAX_PORT}, or 0 for a free one"
            raise ServerError(f"{_flag(name)} {port} is not a port; {remedy}")
    for port in requested.values():
        equal = [_flag(other) for other in requested if requested[other] == port]
        if port and len(equal) > 1:
            raise ServerError(f"{' and '.join(equal)} are both {port}; choose different ports")


def _bind(stack: ExitStack, host: str, name: str, port: int) -> int:
    probe = stack.enter_context(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET))
    if port:
        # Otherwise, the port of a listener that was closed recently would count as taken.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    candidates = [port] if port else [*_free_candidates(), 0]
    for candidate in candidates:
        try:
            probe.bind((host, candidate))
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                raise ServerError(f"--host {host} is not an address of this machine") from None
            if error.errno == errno.EADDRINUSE and candidate != candidates[-1]:
                continue
            why = {errno.EADDRINUSE: "is already in use", errno.EACCES: "is reserved for root"}
            reason = why.get(error.errno or 0, f"cannot be opened ({error.strerror})")
            remedy = f"choose another with {_flag(name)} N, or 0 for a free one"
            raise ServerError(f"port {port} {reason}; {remedy}") from None
        break
    return int(probe.getsockname()[1])


def _free_candidates() -> list[int]:
    # The server opens its ports seconds after they were chosen. Until then, the kernel could assign
    # an ephemeral port to any other socket of this machine.
    try:
        first = int(EPHEMERAL_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return []
    ports = range(FREE_PORTS.start, min(FREE_PORTS.stop, first))
    return random.SystemRandom().sample(ports, min(TRIES, len(ports)))


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
