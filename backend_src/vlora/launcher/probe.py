"""Asks a running server for one short answer, the only way to notice that a model has died.

Triton keeps reporting itself as live and ready after a model's process has ended. A request without
an image to `video_analytics` passes through all four processes (the encoder with zero rows), and
its answer is one token. Such a request leaves two cases open. A server that is starting has not
opened a port yet, so a mark that `vlora serve` leaves on its own machine is looked up. A server
with a long queue answers as late as a hung one, so the count of forward passes in its metrics tells
the two apart.

Kubernetes runs the probe every few seconds: it imports neither torch nor numpy, and every call has
a deadline.
"""

from __future__ import annotations

import time
import urllib.request
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import grpc

from vlora.launcher.grpc_stubs import load_grpc_stubs

service_pb2, service_pb2_grpc = load_grpc_stubs()

ENSEMBLE = "video_analytics"
QUESTION = b"ready?"
SAMPLING = b'{"max_tokens": 1}'
STEPS = "vlora:engine_steps_total"
LOCAL_HOSTS = ("localhost", "127.0.0.1", "[::1]")

METRICS_SHARE = 0.25
"""Share of the deadline reserved for reading the metrics after a request without an answer."""

BUSY_MESSAGES = ("UNAVAILABLE: ", "stopped accepting")
"""Parts of the messages of a healthy server that accepts no requests.

The first is ours (queue full, draining), the second is Triton's while it drains. The status alone
is not enough: gRPC uses the same one for a broken connection.
"""


class Health(IntEnum):
    """The state of a server; the exit status of `vlora probe`."""

    READY = 0
    """The server answers requests."""
    DEAD = 1
    """The server does not listen, a model's process has ended, or the deadline passed without an
    answer and without a forward pass."""
    ALIVE = 3
    """The server runs but accepts no requests now: it starts, drains, or its queue is full."""


@dataclass(frozen=True)
class Finding:
    """The result of a probe, the reason for it, and the seconds that it took."""

    health: Health
    reason: str
    seconds: float


@dataclass(frozen=True)
class Tls:
    """PEM files for a connection with TLS.

    name: the name in the server's certificate, if it differs from the host.
    key, certificate: the client's, for mutual TLS.
    """

    ca: Path
    name: str | None = None
    key: Path | None = None
    certificate: Path | None = None


def _channel(address: str, tls: Tls | None) -> grpc.Channel:
    if tls is None:
        return grpc.insecure_channel(address)
    credentials = grpc.ssl_channel_credentials(
        tls.ca.read_bytes(),
        None if tls.key is None else tls.key.read_bytes(),
        None if tls.certificate is None else tls.certificate.read_bytes(),
    )
    options = () if tls.name is None else (("grpc.ssl_target_name_override", tls.name),)
    return grpc.secure_channel(address, credentials, options)


def probe(
    address: str,
    deadline: float = 5.0,
    tls: Tls | None = None,
    metrics_port: int | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Finding:
    """Probe the gRPC server at `address` (host:port) within `deadline` seconds.

    metrics_port: port of the metrics on the same host. Without it, a request that is not answered
        in time means a hung server, however long its queue is.

    Raises OSError for TLS files that cannot be read, and nothing for faults of the server.
    """
    started = clock()

    def left() -> float:
        return max(deadline - (clock() - started), 0.001)

    def finding(health: Health, reason: str) -> Finding:
        return Finding(health, reason, clock() - started)

    host, _, port = address.rpartition(":")
    with _channel(address, tls) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        try:
            live = stub.ServerLive(service_pb2.ServerLiveRequest(), timeout=left()).live
            ready = stub.ServerReady(service_pb2.ServerReadyRequest(), timeout=left()).ready
        except grpc.RpcError as error:
            if host in LOCAL_HOSTS and port.isdecimal() and _is_starting(int(port)):
                return finding(Health.ALIVE, "the server is starting; it is loading its models")
            return finding(Health.DEAD, f"no server answers at {address}: {_describe(error)}")
        if not (live and ready):
            return finding(Health.ALIVE, "the server is running; its models are not ready yet")
        steps_before = None if metrics_port is None else _steps(host, metrics_port, left())
        try:
            share = 1.0 if metrics_port is None else 1.0 - METRICS_SHARE
            stub.ModelInfer(_request(), timeout=left() * share)
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED and metrics_port is not None:
                steps = _steps(host, metrics_port, left())
                if steps_before is not None and steps is not None and steps > steps_before:
                    return finding(
                        Health.ALIVE,
                        f"no answer yet, but {steps - steps_before:.0f} forward passes:"
                        " the queue is long",
                    )
            return finding(*_judge(error, deadline))
    return finding(Health.READY, f"{ENSEMBLE} answered")


def _judge(error: grpc.RpcError, deadline: float) -> tuple[Health, str]:
    """Return what the error of a request means for the server's health, with the reason."""
    code = error.code()
    if code == grpc.StatusCode.DEADLINE_EXCEEDED:
        return Health.DEAD, f"{ENSEMBLE} did not answer within {deadline:g} s"
    if any(message in (error.details() or "") for message in BUSY_MESSAGES):
        return Health.ALIVE, f"the server accepts no requests now: {_describe(error)}"
    if code == grpc.StatusCode.NOT_FOUND:
        return Health.DEAD, f"the server does not serve {ENSEMBLE}: {_describe(error)}"
    return Health.DEAD, f"{ENSEMBLE} failed: {_describe(error)}"


def _is_starting(port: int) -> bool:
    # Imported only when needed: psutil would take a tenth of the time of a probe.
    from vlora.launcher.run_folder import is_starting

    return is_starting(port)


def _steps(host: str, port: int, seconds: float) -> float | None:
    """Return the number of forward passes from the server's metrics, or None without them."""
    try:
        with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=seconds) as answer:
            lines = answer.read().decode().splitlines()
    except (OSError, ValueError):
        return None
    counts = [float(line.rpartition(" ")[2]) for line in lines if line.startswith(STEPS)]
    return sum(counts) if counts else None


def _request() -> Any:
    """Return a request for one token, with an id of its own."""
    request = service_pb2.ModelInferRequest(
        model_name=ENSEMBLE, id=f"vlora-probe-{uuid.uuid4().hex}"
    )
    for name, value in (("text_input", QUESTION), ("sampling_parameters", SAMPLING)):
        tensor = request.inputs.add(name=name, datatype="BYTES", shape=[1])
        tensor.contents.bytes_contents.append(value)
    request.outputs.add(name="result")
    return request


def _describe(error: grpc.RpcError) -> str:
    first_line = (error.details() or "no details").partition("\n")[0]
    return f"{error.code().name}: {first_line}"
