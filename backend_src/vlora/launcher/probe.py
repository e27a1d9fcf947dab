"""Checks a running server by asking it for an answer of one token.

Triton reports itself as live and ready even after a model's process has ended, so only a request
can detect this. The request goes to `video_analytics` without an image, and passes through all four
model processes. A healthy server does not answer this request in three cases:

- The server is still starting and has not opened a port. On the same machine, a file that `vlora
  serve` creates shows this.
- The server has a long queue and does not answer within the deadline. The counts of forward passes
  or encoded images in its metrics then grow; those of a hung server do not.
- The server is draining, or its queue is full. The error that it sends says so.

Kubernetes runs the probe every few seconds. So this module imports neither torch nor numpy, and
every call has a deadline.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import grpc

from vlora.net import get, grpc_options, is_local, load_grpc_stubs, port_hint

service_pb2, service_pb2_grpc = load_grpc_stubs()
ENSEMBLE = "video_analytics"
QUESTION = b"ready?"
SAMPLING = b'{"max_tokens": 1}'
# Counters that grow while a server works, each with a description of what it counts.
PROGRESS = {
    "vlora:engine_steps_total": "forward passes",
    "vlora:encoder_images_total": "encoded images",
}

# Share of the deadline that is reserved for reading the metrics of a server that does not answer.
METRICS_SHARE = 0.25

# Parts of the error messages of a healthy server that accepts no requests. The first is ours (queue
# full or draining), the second is Triton's while it drains. The status alone does not suffice,
# because gRPC uses the same status for a broken connection.
BUSY_MESSAGES = ("UNAVAILABLE: ", "stopped accepting")


class Health(IntEnum):
    """State of a server. The values are exit codes of `vlora probe`."""

    READY = 0  # The server answers requests.
    # The server does not listen, a model's process has ended, or neither an answer nor progress was
    # seen within the deadline.
    DEAD = 1
    # The server runs but accepts no requests now: it starts, drains, or has a full queue.
    ALIVE = 3


@dataclass(frozen=True)
class Finding:
    """Result of a probe.

    health: state of the server.
    reason: sentence for the user.
    seconds: seconds that the probe took.
    """

    health: Health
    reason: str
    seconds: float


@dataclass(frozen=True)
class Tls:
    """PEM files for a connection with TLS.

    ca: certificate authority.
    name: name in the server's certificate, if it differs from the host.
    key, certificate: key and certificate of the client, for mutual TLS.
    """

    ca: Path
    name: str | None = None
    key: Path | None = None
    certificate: Path | None = None


def _channel(address: str, tls: Tls | None) -> grpc.Channel:
    direct = grpc_options(address.rpartition(":")[0])
    if tls is None:
        return grpc.insecure_channel(address, direct)
    credentials = grpc.ssl_channel_credentials(
        tls.ca.read_bytes(),
        None if tls.key is None else tls.key.read_bytes(),
        None if tls.certificate is None else tls.certificate.read_bytes(),
    )
    name = () if tls.name is None else (("grpc.ssl_target_name_override", tls.name),)
    return grpc.secure_channel(address, credentials, (*direct, *name))


def probe(
    address: str,
    deadline: float = 5.0,
    tls: Tls | None = None,
    metrics_port: int | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Finding:
    """Return the health of the gRPC server at `address` (host:port), within `deadline` seconds.

    metrics_port: port of the metrics on the same host. Without it, a server that does not answer in
        time counts as dead, even if it is working on a long queue.

    Raises OSError for TLS files that cannot be read. Faults of the server are never raised.
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
            if is_local(host) and port.isdecimal() and _is_starting(int(port)):
                return finding(Health.ALIVE, "the server is starting; it is loading its models")
            hint = port_hint(error.details() or "")
            return finding(Health.DEAD, f"no server answers at {address}: {_describe(error)}{hint}")
        if not (live and ready):
            return finding(Health.ALIVE, "the server is running; its models are not ready yet")
        before = None if metrics_port is None else _read_progress(host, metrics_port, left())
        try:
            share = 1.0 if metrics_port is None else 1.0 - METRICS_SHARE
            stub.ModelInfer(_request(), timeout=left() * share)
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED and metrics_port is not None:
                work = _work_done(before, _read_progress(host, metrics_port, left()))
                if work:
                    return finding(
                        Health.ALIVE, f"no answer yet, but {work}: the server is working"
                    )
            return finding(*_judge(error, deadline))
    return finding(Health.READY, f"{ENSEMBLE} answered")


def _judge(error: grpc.RpcError, deadline: float) -> tuple[Health, str]:
    """Return what the error of a request says about the server's health, and the reason."""
    code = error.code()
    if code == grpc.StatusCode.DEADLINE_EXCEEDED:
        return Health.DEAD, f"{ENSEMBLE} did not answer within {deadline:g} s"
    if any(message in (error.details() or "") for message in BUSY_MESSAGES):
        return Health.ALIVE, f"the server accepts no requests now: {_describe(error)}"
    if code == grpc.StatusCode.NOT_FOUND:
        return Health.DEAD, f"the server does not serve {ENSEMBLE}: {_describe(error)}"
    return Health.DEAD, f"{ENSEMBLE} failed: {_describe(error)}"


def _is_starting(port: int) -> bool:
    # Imported only when needed, because importing psutil takes a tenth of the time of a probe.
    from vlora.launcher.run_folder import is_starting

    return is_starting(port)


def _read_progress(host: str, port: int, seconds: float) -> dict[str, float]:
    """Return the counters of `PROGRESS` that the server exports; {} if they cannot be read."""
    try:
        page = get(f"http://{host}:{port}/metrics", seconds, direct=is_local(host))
        lines = page.decode().splitlines()
        counts: dict[str, float] = {}
        for line in lines:
            name = line.partition("{")[0]
            if name in PROGRESS:
                counts[name] = counts.get(name, 0.0) + float(line.rpartition(" ")[2])
    except (OSError, ValueError):
        return {}
    return counts


def _work_done(before: Mapping[str, float] | None, after: Mapping[str, float]) -> str:
    """Return a text with the growth of the counters between two readings; "" without growth."""
    grown = {name: count - (before or {}).get(name, count) for name, count in after.items()}
    return ", ".join(f"{count:.0f} {PROGRESS[name]}" for name, count in grown.items() if count > 0)


def _request() -> Any:
    """Return a request for one token, with a unique id."""
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
