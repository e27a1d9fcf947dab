"""Code that all clients share: connecting, request tensors, streaming, and readable errors."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import queue
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

import numpy as np
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

DEFAULT_URL = "127.0.0.1:8001"
CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 120.0
ADDRESS = re.compile(r"[^/\s]+:(\d{1,5})")
# Error code in a message of the server, with which the name of the gRPC status begins.
CODE = re.compile(r"\b([A-Z_]{8,}): ")
# Text that Triton puts before a model's message. It says nothing to the user of a client.
TRITON_PREFIXES = re.compile(r"(in ensemble '[^']*', |\[request id: [^\]]*\] )+")
# Text of gRPC's errors when the port belongs to an HTTP/1 server, such as Triton's.
NOT_GRPC = re.compile("Failed parsing HTTP/2|Socket closed")
# Messages of a server to requests that it has not begun, and the pauses in seconds before they are
# sent again.
SHUTTING_DOWN = "UNAVAILABLE: the server is shutting down"
PAUSES = {SHUTTING_DOWN: [0.0], "was changed while the request's images were encoded": [1.5] * 4}
NO_PROXY = "no_grpc_proxy"
"""Variable that lists the hosts gRPC reaches without a proxy. It overrides `no_proxy`."""


class ClientError(Exception):
    """Error that the user can correct. It is shown as one sentence, without a traceback."""


def run_main(main: Callable[[], int | None]) -> None:
    """Run a client's `main` and exit with its status. Print an error as one line."""
    _connect_to_this_machine_directly()
    try:
        sys.exit(main() or 0)
    except ClientError as error:
        sys.exit(f"error: {error}")
    except InferenceServerException as error:
        sys.exit(f"error: {explain(error)}")
    except KeyboardInterrupt:
        sys.exit(130)


def _connect_to_this_machine_directly() -> None:
    """Keep gRPC from sending requests for this machine to the proxy that `http_proxy` names."""
    given = os.environ.get(NO_PROXY) or os.environ.get("no_proxy", "")
    os.environ[NO_PROXY] = ",".join(name for name in (given, "localhost", "127.0.0.1") if name)


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that every client has: server address, adapter and task."""
    text = "gRPC address (default: %(default)s)"
    parser.add_argument("--url", default=DEFAULT_URL, metavar="HOST:PORT", help=text)
    text = "LoRA adapter that answers (default: the base model)"
    parser.add_argument("--adapter", metavar="NAME", help=text)
    text = (
        "kind of answer, such as vqa or detect; the server names all of them if it does not know"
        " this one (default: the adapter's own task if it has just one, else vqa)"
    )
    parser.add_argument("--task", metavar="NAME", help=text)


def whole_number(text: str) -> int:
    """Return the value of an option that takes a whole number, which may be negative."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, not '{text}'") from None


def positive_number(text: str) -> int:
    """Return the value of an option that takes a whole number above 0."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number above 0, not '{text}'")
    return int(text)


def decimal_number(text: str) -> float:
    """Return the value of an option that takes a number with or without a decimal point."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, not '{text}'") from None


def sampling_parameters(adapter: str | None, **options: object) -> str:
    """Return `sampling_parameters` as JSON, without the options that are None."""
    parameters = {"lora_name": adapter, **options}
    return json.dumps({key: value for key, value in parameters.items() if value is not None})


def routing_headers(adapter: str | None, stream_id: str | None = None) -> dict[str, str]:
    """Return the header by which Envoy selects one of several servers.

    An adapter is loaded by one server then, and all chunks of a camera's stream reach one, where a
    newer chunk supersedes the older ones.
    """
    parts = [quote(part or "", safe="") for part in (adapter, stream_id)]
    return {"x-lora-adapter": "/".join(parts).rstrip("/")} if any(parts) else {}


def string_input(name: str, values: Sequence[str | bytes]) -> Any:
    """Return an input tensor of type BYTES and shape [len(values)]."""
    raw = [value.encode() if isinstance(value, str) else value for value in values]
    tensor = grpcclient.InferInput(name, [len(raw)], "BYTES")
    tensor.set_data_from_numpy(np.array(raw, dtype=np.object_))
    return tensor


def request_inputs(
    text: str,
    *,
    images: Sequence[bytes] = (),
    frames: Sequence[bytes] = (),
    sampling: str | None = None,
    task: str | None = None,
    metadata: str | None = None,
) -> list[Any]:
    """Return the inputs of one request to either ensemble. Images and frames are encoded files."""
    tensors: dict[str, Sequence[str | bytes]] = {
        "text_input": [text],
        "image": images,
        "frames": frames,
        "sampling_parameters": [] if sampling is None else [sampling],
        "task": [] if task is None else [task],
        "metadata": [] if metadata is None else [metadata],
    }
    return [string_input(name, values) for name, values in tensors.items() if values]


def connect(url: str, model: str) -> Any:
    """Return a gRPC client of a live server that has `model` ready, which the caller closes.

    Raises ClientError with the reason if the server cannot be used.
    """
    parts = ADDRESS.fullmatch(url)
    if parts is None or int(parts[1]) > 65535:
        raise ClientError(f"--url takes HOST:PORT, as in {DEFAULT_URL}, not '{url}'")
    client = grpcclient.InferenceServerClient(url)
    try:
        if not client.is_server_live(client_timeout=CONNECT_SECONDS):
            raise ClientError(f"the server at {url} is not live yet; try again in a moment")
        if not client.is_model_ready(model, client_timeout=CONNECT_SECONDS):
            raise ClientError(f"the server at {url} has no model '{model}' ready")
    except InferenceServerException as error:
        client.close()
        if NOT_GRPC.search(str(error.message())):
            raise ClientError(
                f"the server at {url} does not speak gRPC: HTTP and metrics use other ports; give"
                f" the gRPC port with --url (8001, unless the server uses another)"
            ) from error
        raise ClientError(
            f"no server answers at {url}: start one with `make serve`, or give its gRPC address"
            f" with --url ({explain(error)})"
        ) from error
    except ClientError:
        client.close()
        raise
    return client


def stream_responses(
    client: Any,
    model: str,
    inputs: Sequence[Any],
    request_id: str = "",
    seconds: float = ANSWER_SECONDS,
    headers: Mapping[str, str] | None = None,
) -> Iterator[Any]:
    """Yield each response of one streaming request. Leaving the loop cancels the request.

    A request that a server which shuts down has not begun is sent once more, since Envoy selects
    another server then. So is one whose adapter was changed meanwhile, some times.

    Raises the server's error, or ClientError if `seconds` pass without a response.
    """
    for repeats in itertools.count():
        begun = False
        try:
            for result in _responses(client, model, inputs, request_id, seconds, headers):
                begun = True
                yield result
            return
        except InferenceServerException as error:
            known = (PAUSES[one] for one in PAUSES if one in str(error.message()))
            pauses = next(known, [])[repeats:]
            if begun or not pauses:
                raise
            time.sleep(pauses[0])


def _responses(
    client: Any,
    model: str,
    inputs: Sequence[Any],
    request_id: str,
    seconds: float,
    headers: Mapping[str, str] | None,
) -> Iterator[Any]:
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    client.start_stream(
        callback=lambda result, error: answers.put((result, error)), headers=dict(headers or {})
    )
    finished = False
    try:
        client.async_stream_infer(
            model, list(inputs), request_id=request_id, enable_empty_final_response=True
        )
        while not finished:
            try:
                result, error = answers.get(timeout=seconds)
            except queue.Empty:
                raise ClientError(f"no answer within {seconds:.0f} s") from None
            if error is not None:
                raise error
            response = result.get_response()
            finished = response.parameters["triton_final_response"].bool_param
            if response.outputs:
                yield result
    finally:
        client.stop_stream(cancel_requests=not finished)


def first_string(result: Any, output: str) -> str:
    """Return the first element of a string output, or an empty string if it is absent."""
    values = result.as_numpy(output)
    return "" if values is None or not values.size else bytes(values.reshape(-1)[0]).decode()


def first_number(result: Any, output: str) -> int:
    """Return the first element of a numeric output, or 0 if it is absent."""
    values = result.as_numpy(output)
    return 0 if values is None or not values.size else int(values.reshape(-1)[0])


def explain(error: InferenceServerException) -> str:
    """Return the error's message without Triton's prefixes, but with a code or a gRPC status."""
    message = str(error.message() or error).strip()
    prefixes = TRITON_PREFIXES.match(message)
    message = message[prefixes.end() :] if prefixes else message
    status = str(error.status() or "").removeprefix("StatusCode.")
    named = any(status.startswith(code) for code in CODE.findall(message))
    return message if named or not status else f"{message} [{status}]"
