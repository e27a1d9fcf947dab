"""Fuzzing of a running server: each mutated request must get an answer or an error with a code.

    python -m tests.programs.fuzz --grpc localhost:8001 --http localhost:8000 --count 10000
    python -m tests.programs.fuzz --gateway localhost:8080 --count 10000

Each request is a valid one with one to four mutations of its bytes, shapes, types, JSON, messages,
parameters, images, ids or requested outputs (`mutations.py`). It is sent over unary gRPC, a gRPC
stream, or HTTP `generate`, `generate_stream` or `infer`, or all go to the gateway in front of the
server.

Each fault of a server has a name:
`hang`: no final reply arrives within the deadline.
`untyped`: an error has no code of `vlora.errors` and is not from one of Triton's own checks.
`fault`: the error INTERNAL. `traceback`: a reply contains a traceback.
`dead`: the connection breaks. `parity`: the answer to a valid request has changed.
"""

from __future__ import annotations

import argparse
import http.client
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.programs.mutations import Mutator, Question, as_json
from tests.support.triton_client import picture

DEADLINE = 60.0
"""Seconds within which a request must get its final reply."""

CODED = re.compile(r"(?:^|\W)(INVALID_ARG|NOT_FOUND|UNAVAILABLE|CANCELLED|UNSUPPORTED|INTERNAL): ")

TRITON_CHECKS = (
    "unexpected inference input",
    "unexpected inference output",
    "unexpected shape for input",
    "' data-type is '",
    "invalid datatype for input",
    "data via JSON is not supported",
    "All input dimensions should be specified",
    "input byte size mismatch for input",
    "incomplete string data for inference input",
    "incomplete string length indicator for inference input",
    "string elements",
    "has no shape but model requires batch dimension",
    "batch size does not match other inputs",
    "inference request batch-size must be",
    "But no field is set",
    "has invalid type. It should be either",
    "expected number of inputs between",
    "request has 0 inputs",
    "generate expects model to produce exactly 1 response",
    "support models with decoupled transaction policy",
    "failed to parse the request JSON buffer",
    "Unable to parse '",
    "was not found in the JSON",
)
"""Parts of the messages with which Triton itself rejects a request."""


@dataclass(frozen=True)
class Reply:
    """The reply to one request.

    code: "answered", the code of an error, or the kind of failure.
    message: message of the error.
    wrong: the server's fault, or "".
    """

    code: str
    message: str = ""
    wrong: str = ""


def classify(message: str) -> Reply:
    """Return the reply for an error message."""
    if "Traceback" in message or re.search(r'File "[^"]+", line \d+', message):
        return Reply("error", message, "traceback")
    coded = CODED.search(message)
    if coded is not None:
        return Reply(coded[1], message, "fault" if coded[1] == "INTERNAL" else "")
    if any(text in message for text in TRITON_CHECKS):
        return Reply("Triton's check", message)
    return Reply("error", message, "untyped")


def read_gateway(status: int, text: str) -> Reply:
    """Return the reply in an answer of the gateway: JSON, or events of which the last counts."""
    from vlora.gateway.errors import STATUSES

    if status == 200 and (text.endswith("data: [DONE]\n\n") or text.startswith('{"id":')):
        return Reply("answered")
    try:
        error = json.loads(text.rstrip().rpartition("data: ")[2])["error"]
        code, message = error["code"], error["message"]
    except (ValueError, TypeError, KeyError):
        return Reply("error", text, "untyped")
    if "Traceback" in message or code not in STATUSES or status not in (200, STATUSES[code]):
        return Reply("error", text, "untyped")
    return Reply(code, message, "fault" if code == "INTERNAL" else "")


class Sender:
    """Sender of questions to one server, and to its gateway. Each thread needs its own."""

    def __init__(self, grpc_url: str, http_url: str, gateway_url: str = "") -> None:
        self._gateway_url = gateway_url
        self._channel = grpc.insecure_channel(
            grpc_url,
            [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)],
        )
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._http_url = http_url

    def close(self) -> None:
        self._channel.close()

    def send(self, question: Question) -> Reply:
        """Send one question over the protocol that it names."""
        try:
            if question.way in ("unary", "stream"):
                return self._grpc(question)
            return self._http(question)
        except TimeoutError as error:
            return Reply("none", str(error), "hang")

    def _grpc(self, question: Question) -> Reply:
        try:
            request = service_pb2.ModelInferRequest(model_name=question.model, id=question.id)
            for name, tensor in question.inputs.items():
                request.inputs.add(name=name, datatype=tensor.datatype, shape=tensor.shape)
                request.raw_input_contents.append(tensor.raw)
            for name in question.outputs:
                request.outputs.add(name=name)
            for name, value in question.parameters.items():
                kinds = {bool: "bool_param", int: "int64_param", float: "double_param"}
                kind = kinds.get(type(value), "string_param")
                setattr(request.parameters[name], kind, value)
        except ValueError as error:
            return Reply("not sent", str(error))
        try:
            if question.way == "unary":
                self._stub.ModelInfer(request, timeout=DEADLINE)
                return Reply("answered")
            request.parameters["triton_enable_empty_final_response"].bool_param = True
            for response in self._stub.ModelStreamInfer(iter([request]), timeout=DEADLINE):
                if response.error_message:
                    return classify(response.error_message)
                if response.infer_response.parameters["triton_final_response"].bool_param:
                    return Reply("answered")
            return Reply("none", "the stream ended without a final response", "hang")
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                return Reply("none", "no reply", "hang")
            if error.code() is grpc.StatusCode.UNAVAILABLE and "Socket" in str(error.details()):
                return Reply("none", str(error.details()), "dead")
            return classify(str(error.details()))

    def _http(self, question: Question) -> Reply:
        to_gateway = question.model == "gateway"
        host, _, port = (self._gateway_url if to_gateway else self._http_url).partition(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=DEADLINE)
        path = question.way if to_gateway else f"/v2/models/{question.model}/{question.way}"
        headers = {"content-type": "application/json"} if to_gateway else {}
        try:
            body = as_json(question) if question.body is None else question.body
            connection.request("POST", path, body, headers)
            answer = connection.getresponse()
            content = answer.read()
        except (ConnectionError, http.client.HTTPException) as error:
            return Reply("none", str(error), "dead")
        finally:
            connection.close()
        text = content.decode("utf-8", "replace")
        if to_gateway:
            return read_gateway(answer.status, text)
        if answer.status == 200 and '"error":' not in text[:200]:
            return Reply("answered")
        try:
            message = json.loads(text.removeprefix("data: ")).get("error", text)
        except ValueError:
            message = text
        return classify(str(message))


PARITY_MODELS = ("video_analytics", "visual_retrieval")
UNKNOWN_ADAPTER = "no such adapter"


def whole_text(content: str) -> str | None:
    """Return the complete text in a reply of `generate` or `generate_stream`, or None."""
    pieces = re.findall(r'"text_output":\s*("(?:[^"\\]|\\.)*")', content)
    return "".join(json.loads(piece, strict=False) for piece in pieces) if pieces else None


def _ask_valid(sender: Sender, model: str, keys: Mapping[str, object]) -> str:
    """Return the server's reply to a valid question."""
    question = Question(model, "generate" if model == "video_analytics" else "generate_stream")
    Mutator._set(question, "text_input", b"What is this?")
    Mutator._set(question, "image", picture((90, 3, 7)))
    Mutator._set(question, "sampling_parameters", json.dumps(keys).encode())
    host, _, port = sender._http_url.partition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=DEADLINE)
    try:
        connection.request("POST", f"/v2/models/{model}/{question.way}", as_json(question))
        return connection.getresponse().read().decode()
    finally:
        connection.close()


def known_adapters(message: str) -> list[str]:
    """Return the adapters that the error for an unknown adapter lists."""
    match = re.search(r"Known: ([^\"]*)", message)
    names = match[1].split(", ") if match else []
    return [re.sub(r" and \d+ more$", "", name) for name in names]


def valid_questions(sender: Sender) -> list[tuple[str, Mapping[str, object]]]:
    """Return the models and sampling keys of valid questions.

    They have no adapter, choices, or the server's first adapter that can be loaded, if any.
    """
    keys: list[Mapping[str, object]] = [{}, {"choices": ["red", "blue"]}]
    for name in known_adapters(
        _ask_valid(sender, PARITY_MODELS[0], {"lora_name": UNKNOWN_ADAPTER})
    ):
        with_adapter = {"lora_name": name}
        if whole_text(_ask_valid(sender, PARITY_MODELS[0], with_adapter)) is not None:
            keys.append(with_adapter)
            break
    return [(model, sampling) for model in PARITY_MODELS for sampling in keys]


def valid_answers(
    sender: Sender, questions: list[tuple[str, Mapping[str, object]]]
) -> list[str | None]:
    """Return the complete text of each question's answer, or None."""
    return [whole_text(_ask_valid(sender, model, keys)) for model, keys in questions]


@dataclass
class Report:
    """The results of a run."""

    codes: Counter[str] = field(default_factory=Counter)
    doors: Counter[str] = field(default_factory=Counter)
    ways: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)
    slowest: float = 0.0

    def add(self, index: int, question: Question, reply: Reply, seconds: float) -> None:
        self.codes[reply.code] += 1
        door = {"unary": "gRPC", "stream": "gRPC", "gateway": "gateway"}
        at = door.get(question.model, door.get(question.way, "HTTP"))
        self.doors[f"{at} {reply.code}"] += 1
        self.ways[f"{question.model} {question.way}"] += 1
        self.kinds.update(question.kinds)
        self.slowest = max(self.slowest, seconds)
        if reply.wrong:
            self.wrong[reply.wrong] += 1
            kinds = "+".join(question.kinds)
            self.examples.append(
                f"{reply.wrong}: request {index} ({question.model} {question.way}, {kinds}):"
                f" {reply.message[:300]}"
            )

    def lines(self) -> list[str]:
        def table(title: str, counts: Counter[str]) -> str:
            return f"{title}: " + ", ".join(f"{name} {n}" for name, n in counts.most_common())

        return [
            table("mutations", self.kinds),
            table("ways", self.ways),
            table("replies", self.doors),
            table("wrong", self.wrong) if self.wrong else "wrong: nothing",
            f"slowest reply: {self.slowest:.2f} s",
            *self.examples[:40],
        ]


def run(
    grpc_url: str,
    http_url: str,
    count: int,
    seed: int,
    threads: int = 8,
    first: int = 0,
    progress: Callable[[int], None] = lambda done: None,
    gateway_url: str = "",
) -> Report:
    """Send `count` questions of `seed`. Compare answers to valid questions before and after.

    gateway_url: address of the gateway that gets the questions; "" if the server itself does.
    """
    report = Report()
    senders = [Sender(grpc_url, http_url, gateway_url) for _ in range(threads)]
    questions = valid_questions(senders[0])
    before = valid_answers(senders[0], questions)

    def send_share(number: int) -> None:
        for index in range(first + number, first + count, threads):
            mutator = Mutator(seed, index)
            question = mutator.gateway_question() if gateway_url else mutator.question()
            started = time.monotonic()
            reply = senders[number].send(question)
            report.add(index, question, reply, time.monotonic() - started)
            progress(index)

    try:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(send_share, range(threads)))
        try:
            after = valid_answers(senders[0], questions)
        except OSError as error:
            after = [None] * len(before)
            report.examples.append(f"parity: the server does not answer: {error}")
    finally:
        for sender in senders:
            sender.close()
    if before != after or None in before:
        report.wrong["parity"] += 1
        report.examples.insert(0, f"parity: valid answers were {before}, are now {after}")
    return report


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.programs.fuzz", description=__doc__.splitlines()[0]
    )
    address = {"metavar": "HOST:PORT", "help": "address of the server (default: %(default)s)"}
    parser.add_argument("--grpc", default="localhost:8001", **address)
    parser.add_argument("--http", default="localhost:8000", **address)
    gateway = address | {"help": "address of a gateway in front of the server, which gets all"}
    parser.add_argument("--gateway", default="", **gateway)
    parser.add_argument("--count", type=int, default=1000, metavar="N", help="number of requests")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the mutations")
    parser.add_argument(
        "--first", type=int, default=0, metavar="N", help="index of the first request"
    )
    parser.add_argument(
        "--threads", type=int, default=8, metavar="N", help="number of concurrent requests"
    )
    options = parser.parse_args()
    report = run(
        options.grpc,
        options.http,
        options.count,
        options.seed,
        options.threads,
        options.first,
        gateway_url=options.gateway,
    )
    print("\n".join(report.lines()))
    return 1 if report.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
