"""A client for tests that sends inputs and returns outputs by name, over gRPC and HTTP."""

from __future__ import annotations

import io
import json
import queue
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient
from PIL import Image
from tritonclient.utils import InferenceServerException

from vlora.launcher.repository import ServerOptions
from vlora.launcher.server import TritonServer

TIMEOUT = 60.0
REFRESH_SECONDS = 1.2
"""Time after which every metric has been refreshed; a model refreshes its own once a second."""
KINDS = {"frames_raw": "UINT8", "image_features": "FP32", "image_layout": "INT32"}
KINDS |= {
    "image_size": "INT32",
    "stream": "BOOL",
    "exclude_input_in_output": "BOOL",
    "cancel": "BOOL",
}


class Refused(Exception):
    """An error response. status: the gRPC status, or None on a stream, which has no status."""

    def __init__(self, message: str, status: str | None) -> None:
        super().__init__(message)
        self.message = message
        self.status = status


@dataclass(frozen=True)
class Response:
    """One response: outputs by name, with decoded strings, and Triton's final flag."""

    outputs: Mapping[str, Any]
    final: bool

    def __getitem__(self, name: str) -> Any:
        return self.outputs[name]

    def __contains__(self, name: str) -> bool:
        return name in self.outputs


def to_inputs(values: Mapping[str, Any]) -> list[grpcclient.InferInput]:
    """Return inputs for plain values. A dict becomes JSON. A single value gets shape [1].

    An InferInput is passed on unchanged, for tests with wrong types and shapes.
    """
    return [_to_input(name, value) for name, value in values.items() if value is not None]


def _to_input(name: str, value: Any) -> grpcclient.InferInput:
    if isinstance(value, grpcclient.InferInput):
        return value
    if isinstance(value, dict):
        value = json.dumps(value)
    kind = KINDS.get(name, "BOOL" if name.startswith("return_") else "BYTES")
    if isinstance(value, np.ndarray):
        array = value
    elif kind == "BYTES":
        items = [value] if isinstance(value, str | bytes) else list(value)
        array = np.array([_bytes(item) for item in items] + [None], dtype=object)[:-1]
    else:
        array = np.array([value])
    tensor = grpcclient.InferInput(name, list(array.shape), kind)
    tensor.set_data_from_numpy(array)
    return tensor


def wrong(name: str, array: np.ndarray, kind: str) -> grpcclient.InferInput:
    """Return an input with an arbitrary type and shape, for tests of invalid requests."""
    tensor = grpcclient.InferInput(name, list(array.shape), kind)
    tensor.set_data_from_numpy(array)
    return tensor


def _requested(names: Sequence[str] | None) -> list[grpcclient.InferRequestedOutput] | None:
    return None if names is None else [grpcclient.InferRequestedOutput(name) for name in names]


def _bytes(item: str | bytes) -> bytes:
    return item.encode() if isinstance(item, str) else item


def _text(item: bytes) -> str | bytes:
    """Return an element as text, or as bytes if it is not UTF-8."""
    try:
        return item.decode()
    except UnicodeDecodeError:
        return item


def _read(result: grpcclient.InferResult) -> Response:
    raw = result.get_response()
    outputs = {}
    for output in raw.outputs:
        array = result.as_numpy(output.name)
        if output.datatype == "BYTES":
            texts = [_text(item) for item in array.reshape(-1)]
            outputs[output.name] = texts[0] if len(texts) == 1 and array.ndim == 1 else texts
        elif array.size == 1 and array.ndim == 1 and output.name != "head_scores":
            outputs[output.name] = array.reshape(-1)[0].item()
        else:
            outputs[output.name] = array
    parameter = raw.parameters.get("triton_final_response")
    return Response(outputs, bool(parameter.bool_param) if parameter else True)


class Asker:
    """Sender of requests to one server."""

    def __init__(self, grpc_url: str, http_url: str, metrics_url: str) -> None:
        self.grpc_url = grpc_url
        self.http_url = http_url
        self.metrics_url = metrics_url
        self.client = grpcclient.InferenceServerClient(grpc_url)

    def once(
        self,
        model: str,
        /,
        parameters: Mapping[str, Any] | None = None,
        id: str = "",
        timeout: float = TIMEOUT,
        outputs: Sequence[str] | None = None,
        **values: Any,
    ) -> Response:
        """Send a unary gRPC request for all outputs, or for the named ones."""
        try:
            result = self.client.infer(
                model,
                to_inputs(values),
                request_id=id,
                parameters=dict(parameters or {}),
                client_timeout=timeout,
                outputs=_requested(outputs),
            )
        except InferenceServerException as error:
            raise Refused(error.message(), error.status()) from None
        return _read(result)

    def stream(
        self,
        model: str,
        /,
        parameters: Mapping[str, Any] | None = None,
        id: str = "",
        outputs: Sequence[str] | None = None,
        **values: Any,
    ) -> list[Response]:
        """Send a request on a gRPC stream and return all responses."""
        options = {"parameters": parameters, "id": id, "outputs": outputs}
        with self.streaming(model, **options, **values) as responses:
            return list(responses)

    @contextmanager
    def streaming(
        self,
        model: str,
        /,
        parameters: Mapping[str, Any] | None = None,
        id: str = "",
        outputs: Sequence[str] | None = None,
        **values: Any,
    ) -> Iterator[Iterator[Response]]:
        """Send a request on a gRPC stream and yield an iterator of its responses.

        Leaving the block early cancels the stream.
        """
        client = grpcclient.InferenceServerClient(self.grpc_url)
        arrived: queue.Queue[tuple[Any, Any]] = queue.Queue()
        client.start_stream(lambda result, error: arrived.put((result, error)))
        client.async_stream_infer(
            model,
            to_inputs(values),
            request_id=id,
            parameters=dict(parameters or {}),
            enable_empty_final_response=True,
            outputs=_requested(outputs),
        )
        finished = False

        def responses() -> Iterator[Response]:
            nonlocal finished
            while True:
                result, error = arrived.get(timeout=TIMEOUT)
                if error is not None:
                    finished = True
                    raise Refused(error.message(), error.status())
                response = _read(result)
                finished = response.final
                if response.outputs or not response.final:
                    yield response
                if response.final:
                    return

        try:
            yield responses()
        finally:
            client.stop_stream(cancel_requests=not finished)
            client.close()

    def text(self, model: str, /, **values: Any) -> str:
        """Return the complete text of one streamed answer."""
        return "".join(response["text_output"] for response in self.stream(model, **values))

    def http(self, model: str, endpoint: str, body: Mapping[str, Any] | bytes) -> tuple[int, str]:
        """Send a POST request to `generate` or `generate_stream`. Return its status and body."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://{self.http_url}/v2/models/{model}/{endpoint}", data=data
        )
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def metrics(self) -> dict[str, float]:
        """Return all samples of the metrics by name and labels."""
        with urllib.request.urlopen(self.metrics_url, timeout=TIMEOUT) as answer:
            lines = answer.read().decode().splitlines()
        samples = [line.rpartition(" ") for line in lines if line and not line.startswith("#")]
        return {name: float(value) for name, _, value in samples}

    def close(self) -> None:
        self.client.close()


@contextmanager
def asking(server: TritonServer) -> Iterator[Asker]:
    """Yield a client of `server`, and close it with the context."""
    asker = Asker(server.grpc_url, server.http_url, server.metrics_url)
    try:
        yield asker
    finally:
        asker.close()


def picture(
    colour: tuple[int, int, int] = (200, 30, 30), size: tuple[int, int] = (80, 60)
) -> bytes:
    """Return a PNG of a square on a plain background of this colour."""
    image = Image.new("RGB", size, colour)
    image.paste((255 - colour[0], 255, 0), (10, 10, 30, 30))
    content = io.BytesIO()
    image.save(content, "PNG")
    return content.getvalue()


def png(rgb: np.ndarray) -> bytes:
    """Return a PNG of pixels, uint8 [height, width, 3]."""
    content = io.BytesIO()
    Image.fromarray(rgb).save(content, "PNG")
    return content.getvalue()


def pixels(encoded: Sequence[bytes]) -> np.ndarray:
    """Return the pixels of PNGs of equal size, as the input `frames_raw`."""
    return np.stack([np.asarray(Image.open(io.BytesIO(png))) for png in encoded])


@contextmanager
def serving(options: ServerOptions) -> Iterator[TritonServer]:
    """Run a server that must not fail, and kill it at the end of the context.

    Tests of ends are in test_lifecycle.py and test_serve.py. A graceful one takes five seconds.
    """
    with TritonServer(options) as server:
        yield server
        assert server.failure() is None, f"{server.failure()}\n{server.explain()}"
        server.kill()
