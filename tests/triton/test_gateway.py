"""Tests of the gateway in front of a real server, with OpenAI's official Python client."""

from __future__ import annotations

import base64
import json
import random
import socket
from contextlib import ExitStack, closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.programs.bombs import CHAT, GENERATE, Videos, attack
from tests.support.families import Family, make_family
from tests.support.gateway import KEY, Gateway, running
from tests.support.polling import until
from tests.support.served_family import check_conversations
from tests.support.triton_client import Asker, picture, serving
from vlora.launcher.repository import ServerOptions
from vlora.launcher.server import TritonServer

openai = pytest.importorskip("openai", reason="the package openai is not installed")

LONG = {"max_tokens": 900, "extra_body": {"ignore_eos": True}}
JSON = {"content-type": "application/json"}
PROMPT = "What color is the square?"
PICTURE = "messages[0].content[0].image_url.url"


def image(content: bytes) -> dict[str, Any]:
    url = f"data:image/png;base64,{base64.b64encode(content).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def question(words: str = PROMPT, *images: bytes) -> list[dict[str, Any]]:
    parts = [*map(image, images), {"type": "text", "text": words}]
    return [{"role": "user", "content": parts}]


def test_clips_stand_anywhere_among_pictures(gateway: Gateway, ask: Asker) -> None:
    pytest.importorskip("av", reason="the extra video is not installed")
    from tests.support.video_files import video

    def clip(data: bytes) -> dict[str, Any]:
        url = f"data:video/mp4;base64,{base64.b64encode(data).decode()}"
        return {"type": "video_url", "video_url": {"url": url}}

    frames = [base64.b64encode(picture((0, 0, shade))).decode() for shade in (0, 90, 180)]
    listed = f"data:video/jpeg;base64,{','.join(frames)}"
    words, files = {"type": "text", "text": PROMPT}, [video(), listed, video("vp9")]
    sampling = {"media_io_kwargs": {"video": {"num_frames": 3}}, "temperature": 0, "max_tokens": 8}
    of_list = {"type": "video_url", "video_url": {"url": listed}}
    parts = [clip(files[0]), of_list, image(picture()), clip(files[2]), words]
    kinds = [{"type": kind} for kind in ("video", "video", "image", "video")]
    conversation = json.dumps({"messages": [{"role": "user", "content": [*kinds, words]}]})
    (expected,) = ask.stream(
        "lmm",
        text_input=conversation,
        image=picture(),
        video=files,
        task="chat",
        sampling_parameters=sampling,
        exclude_input_in_output=True,
        return_num_input_tokens=True,
    )
    create = gateway.client.chat.completions.create
    keys = {"media_io_kwargs": sampling["media_io_kwargs"]}
    messages = [{"role": "user", "content": parts}]
    answer = create(model="base", messages=messages, max_tokens=8, extra_body=keys)
    assert answer.choices[0].message.content == expected["text_output"]
    assert answer.usage.prompt_tokens == expected["num_input_tokens"]
    by_list = [{"role": "user", "content": [of_list, image(picture()), words]}]
    by_frames = {"image": picture(), "frames": [picture((0, 0, shade)) for shade in (0, 90, 180)]}
    content = [{"type": "video"}, {"type": "image"}, words]
    (expected,) = ask.stream(
        "lmm",
        text_input=json.dumps({"messages": [{"role": "user", "content": content}]}),
        task="chat",
        sampling_parameters={"temperature": 0, "max_tokens": 8},
        exclude_input_in_output=True,
        **by_frames,
    )
    answer = create(model="base", messages=by_list, max_tokens=8)
    assert answer.choices[0].message.content == expected["text_output"]
    messages = [{"role": "user", "content": [*parts[:3], clip(b"no video at all"), words]}]
    with pytest.raises(openai.BadRequestError, match="video 2 is neither") as refused:
        create(model="base", messages=messages)
    assert refused.value.param == "messages[0].content[3].video_url.url"


def test_hostile_video_files_get_typed_errors_and_open_nothing(
    gateway: Gateway, server: TritonServer, tmp_path: Path
) -> None:
    pytest.importorskip("av", reason="the extra video is not installed")
    from tests.support.video_traps import Trap, lures

    draw = random.Random(5)
    triton = Gateway(gateway.process, server.http_url, gateway.log)
    with closing(Trap(tmp_path)) as trap:
        found = attack(gateway, triton, 40, draw, [Videos(draw, lures(trap), large=False)])
        assert not trap.sprung()
    assert {(line["door"], line["status"]) for line in found} == {
        (door, status) for door in (CHAT, GENERATE) for status in (200, 400)
    }
    refused = [line["answer"] for line in found if line["status"] == 400]
    assert all("INVALID_ARG" in answer or '"code": ' in answer for answer in refused)


def test_ten_seconds_of_video_as_eighty_frames_become_an_alert_of_one_token(
    checkpoint: Path, tmp_path: Path
) -> None:
    pytest.importorskip("av", reason="the extra video is not installed")
    from tests.support.video_files import pictures, video

    family = make_family("qwen2_5_vl", checkpoint, tmp_path, official=True)
    config = json.loads((family.checkpoint / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = 16384
    (family.checkpoint / "config.json").write_text(json.dumps(config))
    # 16 × 16 tokens for two frames, as Qwen2.5-VL makes of 448 × 448 pixels.
    size = {"min_pixels": 128 * 128, "max_pixels": 128 * 128}
    clip = base64.b64encode(video(frames=pictures(250, 448, 448))).decode()
    message = {"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{clip}"}}
    options = ServerOptions(
        model=family.checkpoint, adapters=family.adapters, log=tmp_path / "server.log"
    )
    tokens = {}
    with serving(options) as server, running(server.grpc_url, tmp_path) as gateway:
        for frames in (80, 2):
            answer = gateway.client.chat.completions.create(
                model="base",
                max_tokens=1,
                messages=[{"role": "user", "content": [message, {"type": "text", "text": PROMPT}]}],
                extra_body={
                    "media_io_kwargs": {"video": {"num_frames": frames}},
                    "mm_processor_kwargs": size,
                },
            )
            assert answer.usage.completion_tokens == 1
            tokens[frames] = answer.usage.prompt_tokens
    assert tokens[80] - tokens[2] == 39 * 256


def test_the_models_are_the_base_and_every_usable_adapter(
    gateway: Gateway, served_adapters: Path
) -> None:
    models = {model.id: model for model in gateway.client.models.list()}
    usable = {folder.name for folder in served_adapters.iterdir()} - {"broken"}
    assert models.keys() == {"base", "alias", *usable}
    assert models["alias"].parent == "base"
    assert gateway.client.models.retrieve("alias").ranks == [4]
    with pytest.raises(openai.NotFoundError, match="'nothing' does not exist"):
        gateway.client.models.retrieve("nothing")


@pytest.mark.parametrize("task", ["chat", "vqa"])
def test_an_answer_is_that_of_the_server(gateway: Gateway, ask: Asker, task: str) -> None:
    """Without a task, messages get the chat template."""
    parts = [{"type": "image"}, {"type": "image"}, {"type": "text", "text": PROMPT}]
    conversation = json.dumps({"messages": [{"role": "user", "content": parts}]})
    named = {} if task == "chat" else {"task": task}
    for model, adapter in (("base", {}), ("all-r8", {"lora_name": "all-r8"})):
        sampling = {"temperature": 0, "max_tokens": 8, **adapter}
        (expected,) = ask.stream(
            "lmm",
            text_input=conversation if task == "chat" else PROMPT,
            image=[picture(), picture((0, 0, 99))],
            task=task,
            sampling_parameters=sampling,
            exclude_input_in_output=True,
            return_num_input_tokens=True,
        )
        answer = gateway.client.chat.completions.create(
            model=model,
            messages=question(PROMPT, picture(), picture((0, 0, 99))),
            max_tokens=8,
            extra_body=named,
        )
        assert answer.choices[0].message.content == expected["text_output"]
        assert answer.usage.prompt_tokens == expected["num_input_tokens"]
        assert answer.vlora["task"] == task
        assert (answer.vlora["adapter"] or {}).get("name") == adapter.get("lora_name")


def test_a_stream_is_the_whole_answer_in_pieces(gateway: Gateway) -> None:
    options: dict[str, Any] = {
        "model": "base",
        "messages": question(PROMPT, picture()),
        "max_tokens": 12,
        "logprobs": True,
        "top_logprobs": 2,
        "extra_body": {"ignore_eos": True},
    }
    whole = gateway.client.chat.completions.create(**options)
    chunks = list(
        gateway.client.chat.completions.create(
            **options, stream=True, stream_options={"include_usage": True}
        )
    )
    choices = [chunk.choices[0] for chunk in chunks[:-1]]
    assert choices[0].delta.role == "assistant"
    assert "".join(one.delta.content or "" for one in choices) == whole.choices[0].message.content
    tokens = [token for one in choices if one.logprobs for token in one.logprobs.content]
    expected = whole.choices[0].logprobs.content
    assert [token.bytes for token in tokens] == [token.bytes for token in expected]
    # The second request finds its prompt in the cache, so its sums have another order.
    assert [token.logprob for token in tokens] == pytest.approx(
        [token.logprob for token in expected], abs=1e-4
    )
    assert len(tokens) == 12
    assert all(len(token.top_logprobs) == 2 for token in tokens)
    assert [one.finish_reason for one in choices] == [None] * (len(choices) - 1) + ["length"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 12
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens > 0


def test_sampling_fields_reach_the_server(gateway: Gateway) -> None:
    def text(**fields: Any) -> str:
        options = {"max_tokens": 8, "extra_body": {"ignore_eos": True}, **fields}
        answer = gateway.client.chat.completions.create(
            model="base", messages=question(), **options
        )
        return str(answer.choices[0].message.content)

    drawn = {"temperature": 2, "seed": 5}
    assert text(**drawn) == text(**drawn) != text(temperature=2, seed=6)
    words = text()
    stop = words[len(words) // 2 :][:3]
    assert text(stop=stop) == words.partition(stop)[0]
    assert text(extra_body={"guided_choice": ["one", "two"]}) in ("one", "two")


def test_a_completion_continues_a_raw_prompt(gateway: Gateway, ask: Asker) -> None:
    sampling = {"temperature": 0, "max_tokens": 6}
    expected = ask.text(
        "lmm", text_input="hello", stream=True, task="raw", sampling_parameters=sampling
    )
    options = {"model": "base", "prompt": "hello", "max_tokens": 6, "logprobs": 1}
    whole = gateway.client.completions.create(**options)
    assert whole.choices[0].text == expected
    assert len(whole.choices[0].logprobs.tokens) == whole.usage.completion_tokens
    pieces = gateway.client.completions.create(**options, stream=True)
    assert "".join(piece.choices[0].text for piece in pieces) == expected


def test_conversations_are_those_of_the_stock_model(
    gateway: Gateway, checkpoint: Path, tmp_path: Path
) -> None:
    check_conversations(gateway, Family(checkpoint, tmp_path))


@pytest.mark.parametrize(
    ("fields", "status", "code", "param"),
    [
        ({"model": "nothing"}, 404, "NOT_FOUND", "model"),
        ({"model": "broken"}, 400, "adapter_broken", "model"),
        ({"temperature": -1}, 400, "INVALID_ARG", "temperature"),
        ({"n": 2}, 400, "UNSUPPORTED", "n"),
        ({"messages": question("x", b"no picture")}, 400, "INVALID_ARG", PICTURE),
        ({"messages": question("x " * 3000)}, 400, "INVALID_ARG", None),
        ({"extra_body": {"task": "sing"}}, 400, "INVALID_ARG", None),
        ({"extra_body": {"deadline_ms": 0.001}}, 499, "CANCELLED", "deadline_ms"),
    ],
)
def test_an_error_has_the_form_and_the_class_of_the_official_client(
    gateway: Gateway, fields: dict[str, Any], status: int, code: str, param: str | None
) -> None:
    for stream in (False, True):
        with pytest.raises(openai.APIStatusError) as refused:
            gateway.client.chat.completions.create(
                **{"model": "base", "messages": question(), "stream": stream, **fields}
            )
        error = refused.value
        assert (error.status_code, error.code, error.param) == (status, code, param)
        assert isinstance(error, openai.NotFoundError) == (status == 404)


def test_a_superseded_stream_is_no_failure_of_http(gateway: Gateway) -> None:
    keys = {"deadline_ms": 0.001, "stream_id": "camera"}

    def ask(**fields: Any) -> tuple[int, str]:
        body = {"model": "base", "messages": question(), **keys, **fields}
        return gateway.http("/v1/chat/completions", json.dumps(body).encode())

    status, text = ask(stream=True, supersede=True)
    assert status == 200
    assert json.loads(text.removeprefix("data: "))["error"]["code"] == "CANCELLED"
    assert ask(stream=True)[0] == ask(supersede=True)[0] == 499
    with pytest.raises(openai.APIError, match="deadline"):
        list(
            gateway.client.chat.completions.create(
                model="base",
                messages=question(),
                stream=True,
                extra_body={**keys, "supersede": True},
            )
        )
    assert '"code": "CANCELLED"' in gateway.log.read_text()


def test_clients_that_leave_end_their_requests(gateway: Gateway, ask: Asker) -> None:
    def value(name: str) -> float:
        return ask.metrics()[name + '{model="lmm",version="1"}']

    def post(body: bytes, **headers: str) -> HTTPConnection:
        connection = HTTPConnection(gateway.address, timeout=60)
        connection.request("POST", "/v1/chat/completions", body, {**JSON, **headers})
        return connection

    before = value("vlora:requests_aborted_total")
    half = post(b"{", **{"content-length": "100"})
    until(lambda: gateway.running() == 1)
    descriptors = psutil.Process(gateway.process.pid).num_fds()
    body = {"model": "base", "messages": question(), "max_tokens": 900, "ignore_eos": True}
    half_closed = post(json.dumps(body).encode())
    until(lambda: gateway.running() == 2)
    half_closed.sock.shutdown(socket.SHUT_WR)
    assert half_closed.sock.recv(1) == b"", "it is not answered"
    half_closed.close()
    whole = post(json.dumps(body).encode())
    with ExitStack() as streams:
        for _ in range(20):
            stream = gateway.client.chat.completions.create(
                model="base", messages=question(), stream=True, **LONG
            )
            streams.callback(stream.close)
            next(stream)
    whole.close()
    half.close()
    until(lambda: gateway.running() == 0)
    until(lambda: psutil.Process(gateway.process.pid).num_fds() < descriptors)
    until(lambda: value("vllm:num_requests_running") == 0)
    until(lambda: value("vlora:requests_aborted_total") > before)


def test_wrong_requests_of_http_are_refused(gateway: Gateway) -> None:
    path = "/v1/chat/completions"

    def code(*arguments: Any) -> tuple[int, str]:
        status, body = gateway.http(*arguments)
        return status, json.loads(body)["error"]["code"]

    assert code("/v1/nothing") == (404, "NOT_FOUND")
    assert "begin with /v1/" in gateway.http("/models")[1]
    assert "did you mean '/v1/chat/completions'?" in gateway.http("/v1/chat/completion")[1]
    assert code(path) == (405, "METHOD_NOT_ALLOWED")
    assert "; use POST" in gateway.http(path)[1]
    assert code(path, b"{") == (400, "INVALID_ARG")
    assert code(path, b"{}", {"content-type": "text/plain"}) == (400, "INVALID_ARG")
    assert code(path, b" " * (16 << 20)) == (413, "TOO_LARGE"), "the client must get to read it"
    assert code(path, b"{}", {"host": "attacker.example"}) == (403, "PERMISSION_DENIED")
    assert code(path, b"{}", {"origin": "https://page.example"}) == (403, "PERMISSION_DENIED")
    assert gateway.http("/health") == (200, '{"status":"ok"}')


def test_the_metrics_include_the_servers(gateway: Gateway) -> None:
    gateway.client.chat.completions.create(model="base", messages=question(), max_tokens=1)
    page = gateway.http("/metrics")[1]
    assert 'vlora_gateway_requests_total{route="/v1/chat/completions",status="200"}' in page
    assert "\nvlora:requests_finished_total{" in page


def test_the_log_has_neither_keys_nor_prompts(gateway: Gateway) -> None:
    gateway.client.chat.completions.create(model="base", messages=question(), max_tokens=1)
    lines = gateway.log.read_text().splitlines()[1:]
    assert {"id", "tenant", "status", "seconds"} <= json.loads(lines[0]).keys()
    assert not [line for line in lines if KEY in line or PROMPT in line]


def test_a_gateway_with_keys_admits_their_tenants(server: TritonServer, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"# tenants\nalice {KEY}\n")
    with running(server.grpc_url, tmp_path, "--keys", str(keys), "--host", "0.0.0.0") as gateway:
        gateway.address = gateway.address.replace("0.0.0.0", "127.0.0.1")
        client = gateway.client.with_options(base_url=f"http://{gateway.address}/v1")
        assert client.models.list().data
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="another").models.list()
        assert gateway.http("/metrics")[0] == 401
        assert gateway.http("/health")[0] == 200


def test_a_gateway_without_a_server_says_so(tmp_path: Path) -> None:
    with running("127.0.0.1:9", tmp_path) as gateway:
        assert gateway.http("/health")[0] == 503
        with pytest.raises(openai.InternalServerError, match="cannot be reached") as refused:
            gateway.client.chat.completions.create(model="base", messages=question())
        assert (refused.value.status_code, refused.value.code) == (503, "UNAVAILABLE")
