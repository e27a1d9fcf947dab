"""A server that answers immediately, so that the time to first token is the gateway's own cost.

usage: python -m benchmarks.instant_server PORT
"""

from __future__ import annotations

import asyncio
import json
import os
import struct
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from benchmarks.loads import OUTPUT
from vlora.launcher.processes import start_tied
from vlora.net import LOOPBACK, choose_ports, load_grpc_stubs

service_pb2, service_pb2_grpc = load_grpc_stubs()

STOP_SECONDS = 10.0
DESCRIPTION = {"max_model_len": 4096, "tasks": ["raw"], "adapters": []}


class InstantServer:
    """The server in its own process. It has no metrics. Use as a context manager.

    It may not answer yet when the context opens. The gateway's `/health` shows when it is ready.
    """

    metrics_url: str | None = None

    def __init__(self) -> None:
        self._port = choose_ports({"port": 0}, LOOPBACK)["port"]
        self.grpc_url = f"{LOOPBACK}:{self._port}"

    def __enter__(self) -> InstantServer:
        command = [sys.executable, "-m", __name__, str(self._port)]
        self._process = start_tied(command, os.environ, None)
        return self

    def __exit__(self, *error: object) -> None:
        self._process.terminate()
        self._process.wait(STOP_SECONDS)


class Answers:
    """Handler of requests.

    The answer to a question has `OUTPUT` tokens. The answer to a request with the input `describe`
    is a description of the server.
    """

    async def stream(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        """Answer the requests of one stream."""
        async for request in requests:
            if request.inputs[0].name == "describe":
                yield _response(request.id, True, details=_text(json.dumps(DESCRIPTION)))
                continue
            for number in range(1, OUTPUT + 1):
                reason = "length" if number == OUTPUT else "None"
                yield _response(
                    request.id,
                    number == OUTPUT,
                    text_output=_text("x"),
                    finish_reason=_text(reason),
                    num_output_tokens=struct.pack("<I", 1),
                )


def _text(text: str) -> bytes:
    return struct.pack("<I", len(text)) + text.encode()


def _response(id: str, final: bool, **outputs: bytes) -> Any:
    response = service_pb2.ModelInferResponse(model_name="lmm", id=id)
    response.parameters["triton_final_response"].bool_param = final
    for name, raw in outputs.items():
        datatype = "UINT32" if name.startswith("num_") else "BYTES"
        response.outputs.add(name=name, datatype=datatype, shape=[1])
        response.raw_output_contents.append(raw)
    return service_pb2.ModelStreamInferResponse(infer_response=response)


async def main(port: int) -> None:
    """Serve until the process is ended."""
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1)])
    servicer = type("Servicer", (service_pb2_grpc.GRPCInferenceServiceServicer,), {})()
    servicer.ModelStreamInfer = Answers().stream
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(servicer, server)
    server.add_insecure_port(f"{LOOPBACK}:{port}")
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
