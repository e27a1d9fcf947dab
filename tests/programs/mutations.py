"""Valid requests and their mutations for `fuzz.py`, determined by a seed and an index.

Two kinds of requests are left out because they crash Triton 2.51 (README): requests for class
results, and requests to HTTP's `infer` whose shape is larger than the memory.
"""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.support.triton_client import picture

MODELS = ("video_analytics", "visual_retrieval", "lmm", "lmm_unary", "vision_encoder", "task_head")
STREAMS = ("visual_retrieval", "lmm")
KEYS: Mapping[str, tuple[Any, ...]] = {
    "max_tokens": (1, 5, "7", 0, -1, 10**9, 10**30, 2.5, None, "x", [3], True),
    "temperature": (0, 0.7, "0.5", -1, 1e308, "nan", "inf", None, {}, 101),
    "top_k": (0, -1, 5, -2, "3", 10**12, 1.5),
    "top_p": (1.0, 0.1, 0, 1.1, "0.9", -0.0),
    "min_p": (0, 0.5, 2),
    "seed": (0, -1, 7, 2**63, 2**64, -(2**63) - 1, "9", 1.0),
    "stop": ("a", ["a", "b"], [], [""], ["x"] * 17, 5, None, [["a"]], "\x00"),
    "stop_token_ids": ([1], [-1], [10**9], ["a"], "1", []),
    "min_tokens": (0, 3, -1, 10**9),
    "ignore_eos": (True, False, "true", "maybe", 1),
    "word_probabilities": (["yes", "no"], ["zebra"], [], [1], "yes", [""], ["a"] * 17, None),
    "logprobs": (0, 3, 20, 21, -1, None, True),
    "repetition_penalty": (1.0, 1.5, 0, -1, 1e300),
    "presence_penalty": (0, 2, -2, 3),
    "frequency_penalty": (0, 2, -2, "x"),
    "choices": (["red", "blue"], [], ["red"] * 300, [1], "red", ["é" * 50, "ж"], ["a", "ab"]),
    "lora_name": ("attention-r4", "feed-forward-r16", "head-r8", "broken", "no", "", "../x", None),
    "n": (1, 2, "1", 0),
    "best_of": (1, 2),
    "priority": (1,),
    "deadline_ms": (5,),
    "skip_special_tokens": (True, False, "false", None, 2, []),
    "include_stop_str_in_output": (True, False, "no"),
    "stream_id": ("camera", "", 5, "x" * 300),
    "supersede": (True, False, "x"),
    "stream_interval_ms": (0, 20, -1, 1e9, "5"),
    "structured_outputs": ({"regex": "[ab]{3}"}, '{"choice": ["a"]}', {"json": 5}, {}, "x", None),
    "guided_json": ({"type": "string", "maxLength": 3}, {"type": "x"}, {"$ref": "#"}, True, "{"),
    "guided_regex": ("a{2}", "(", "[ab]{400}", "a{99999}", "(a|b)*\\d", "", 5),
    "nonsense": (1,),
    "\u202e\x00": (1,),
}
RAW_JSON = (
    "",
    "{",
    "[]",
    "null",
    "NaN",
    '{"temperature": NaN}',
    '{"temperature": -Infinity}',
    '{"temperature": 1e999}',
    r'{"lora_name": "\ud800"}',
    r'{"\udfff": 1}',
    r'{"choices": ["\ud83d"]}',
    r'{"stop": "\u0000"}',
    '{"seed": ' + "9" * 5000 + "}",
    '{"a": ' * 5000,
    '{"stop": ' + "[" * 900 + "]" * 900 + "}",
    '{"seed": 1, "seed": 2}',
    '{"x": "' + "y" * 70000 + '"}',
)
BYTES = (b"", b"\xff\xfe", b"\xed\xa0\x80", b"\x00", "\u202eé\U0001f600".encode(), b"A" * 3000)
TASKS = ("vqa", "caption", "refer", "detect", "classify", "video", "raw", "dance", "", "\u2028")
TASKS += ("chat", "auto")
CHAT_OPTIONS = ("add_generation_prompt", "continue_final_message")
MARKERS = "</s><s><|user|><image><|image_pad|><video>"
WORDS = (*["What is this?"] * 5, "", " ", MARKERS, "\u0000", "x " * 700, "a\n\nb")
# Values for any place of a JSON object.
ODD = (*WORDS, None, True, -1, 1e308, 2**64, [], {}, [None], {"type": "text"}, "\ud800", "tool")
# Fields of a request to the gateway, besides the sampling keys.
FIELDS: Mapping[str, tuple[Any, ...]] = {
    "model": ("base", "feed-forward-r16", "head-r8", "broken", "nothing", "", "x" * 300, 3),
    "task": (*TASKS, None, 3),
    "stream": (True, True, False, "yes"),
    "stream_options": ({"include_usage": True}, {"include_usage": 1}, {"x": True}, []),
    "add_generation_prompt": (True, False, None, "no"),
    "continue_final_message": (True, True, False, 1),
    "logprobs": (True, False, 2, 99, "x"),
    "top_logprobs": (0, 3, 21, -1, "x"),
    "max_completion_tokens": (3, 0, -1, "x"),
    "response_format": (
        {"type": "json_object"},
        {"type": "json_object", "schema": {"type": "object"}},
        {"type": "json_schema", "json_schema": {"schema": {"const": 1}}},
        {"type": "json_schema"},
        {"type": "xml"},
        "text",
    ),
    "user": ("me", 5),
    "echo": (True, False),
    "tools": ([], [{"type": "function"}]),
    "nothing": (1,),
}


@dataclass
class Tensor:
    """One input as it is sent. `raw` need not match shape and type."""

    datatype: str
    shape: list[int]
    raw: bytes

    @classmethod
    def strings(cls, *items: bytes) -> Tensor:
        """Return a tensor of strings, in Triton's encoding."""
        raw = b"".join(len(item).to_bytes(4, "little") + item for item in items)
        return cls("BYTES", [len(items)], raw)

    @classmethod
    def array(cls, array: np.ndarray, datatype: str) -> Tensor:
        """Return a tensor with the content of `array`."""
        return cls(datatype, list(array.shape), array.tobytes())


@dataclass
class Question:
    """One request, which can be sent over several protocols. One to the gateway has only a body.

    way: protocol, endpoint of HTTP, or path of the gateway.
    inputs: inputs for gRPC. texts: the same inputs for JSON. kinds: names of the mutations.
    """

    model: str
    way: str
    inputs: dict[str, Tensor] = field(default_factory=dict)
    texts: dict[str, Any] = field(default_factory=dict)
    parameters: dict[str, Any] = field(default_factory=dict)
    outputs: list[str] = field(default_factory=list)
    id: str = ""
    body: bytes | None = None
    kinds: list[str] = field(default_factory=list)


OUTPUTS = {
    "video_analytics": ("result", "text_output", "finish_reason", "num_input_tokens"),
    "visual_retrieval": ("text_output", "finish_reason", "num_input_tokens", "metadata_output"),
    "lmm": ("text_output", "finish_reason", "logprobs", "details", "head_scores", "metadata"),
    "lmm_unary": ("text_output", "finish_reason", "logprobs", "details", "cumulative_logprob"),
    "vision_encoder": (
        "image_features",
        "image_layout",
        "image_size",
        "image_digest",
        "image_videos",
        "image_adapter",
    ),
    "task_head": ("result",),
}


def to_base64(content: bytes) -> str:
    return base64.b64encode(content).decode()


class Mutator:
    """Generator of question number `index` of a seed."""

    def __init__(self, seed: int, index: int) -> None:
        self.dice = random.Random(f"{seed} {index}")

    def question(self) -> Question:
        """Return a valid question with one to four mutations."""
        dice = self.dice
        model = dice.choices(MODELS, (6, 5, 6, 4, 2, 1))[0]
        ways = ["stream", "generate_stream"] if model in STREAMS else ["unary", "infer"]
        ways += ["generate"] if model != "visual_retrieval" else []
        question = Question(model, dice.choice(ways))
        if dice.random() < 0.04:
            question.way = dice.choice(("unary", "infer", "stream", "generate_stream"))
        self._make_valid(question)
        mutations: list[Callable[[Question], None]] = [
            self._sampling,
            self._sampling,
            self._raw_json,
            self._parameters,
            self._parameters,
            self._image,
            self._image,
            self._text,
            self._task_and_metadata,
            self._chat,
            self._chat,
            self._features,
            self._shape,
            self._datatype,
            self._bytes,
            self._flags if model in ("lmm", "lmm_unary") else self._outputs,
            self._outputs,
            self._id,
            self._drop,
            self._unknown,
        ]
        for _ in range(dice.choice((1, 1, 1, 2, 2, 3, 4))):
            mutation = dice.choice(mutations)
            mutation(question)
            question.kinds.append(mutation.__name__.strip("_"))
        if question.way not in ("unary", "stream") and dice.random() < 0.12:
            self._body(question)
            question.kinds.append("body")
        return question

    def gateway_question(self) -> Question:
        """Return a request to the gateway with odd fields, and odd values in its objects."""
        dice = self.dice
        kind = dice.choice(("chat/completions", "chat/completions", "completions"))
        question = Question("gateway", f"/v1/{kind}")
        body: dict[str, Any] = {"model": "base", "max_tokens": dice.randint(1, 6)}
        if kind == "completions":
            body["prompt"] = dice.choice((*WORDS, *WORDS, ["a"], ["a", "b"], 5))
        else:
            body |= self._messages(self._url_part)
        known = FIELDS | KEYS
        for name in dice.sample(sorted(known), dice.choice((0, 0, 1, 1, 2))):
            body[name] = deepcopy(dice.choice(known[name]))
            question.kinds.append(name)
        for _ in range(dice.choice((0, 0, 0, 1, 2))):
            self._spoil(body)
            question.kinds.append("spoiled")
        question.body = json.dumps(body).encode()
        if dice.random() < 0.1:
            question.body = self._flipped(question.body)
            question.kinds.append("body")
        elif dice.random() < 0.03:
            question.body = dice.choice(RAW_JSON).encode()
            question.kinds.append("raw")
        return question

    def _messages(self, media: Callable[[str], Any]) -> dict[str, Any]:
        """Return messages with their options. media: returns a part of a type."""
        dice = self.dice
        kinds = dice.choices(("text", "image", "video"), (6, 3, 1), k=dice.randint(1, 6))
        parts = [
            {"type": "text", "text": dice.choice(WORDS)} if kind == "text" else media(kind)
            for kind in kinds
        ]
        turns = []
        while parts:
            count = dice.randint(1, len(parts))
            role = dice.choice(("user", "user", "assistant", "assistant", "system", "developer"))
            turns.append({"role": role, "content": parts[:count]})
            parts = parts[count:]
        if dice.random() < 0.3:
            turns[-1]["content"] = dice.choice(WORDS)
        chat = {"messages": turns}
        if turns[-1]["role"] == "assistant" and dice.random() < 0.7:
            chat |= dict(zip(CHAT_OPTIONS, (False, True), strict=True))
        return chat

    def _url_part(self, kind: str) -> dict[str, Any]:
        dice = self.dice
        content = to_base64(picture() if dice.random() < 0.7 else self._picture())
        if kind == "video":
            url = "data:video/jpeg;base64," + ",".join([content] * dice.randint(1, 4))
        else:
            url = f"data:image/png;base64,{content}"
        part = {"url": dice.choice((*[url] * 8, "http://127.0.0.1/a.png", "data:"))}
        if kind == "image" and dice.random() < 0.2:
            part["detail"] = dice.choice(("low", "sharp"))
        return {"type": f"{kind}_url", f"{kind}_url": part}

    def _spoil(self, value: Any) -> None:
        """Replace, delete or add one value, at any depth of an object."""
        dice = self.dice
        while True:
            keys = list(value) if isinstance(value, dict) else list(range(len(value)))
            if not keys:
                return
            key = dice.choice(keys)
            if not isinstance(value[key], dict | list) or dice.random() < 0.3:
                break
            value = value[key]
        how, odd = dice.randrange(4), deepcopy(dice.choice(ODD))
        if how == 0:
            del value[key]
        elif how == 1 and isinstance(value, dict):
            names = ("extra", "name", "id", "reasoning_content", "type", "\u202e")
            value[dice.choice(names)] = odd
        else:
            value[key] = odd

    def _make_valid(self, question: Question) -> None:
        dice = self.dice
        text = dice.choice(("What is this?", "How many stars?", "the star"))
        self._set(question, "text_input", text.encode())
        if dice.random() < 0.6 and question.model != "task_head":
            pictures = [picture((dice.randrange(8) * 30, 40, 9)) for _ in range(dice.randint(1, 2))]
            self._set(question, dice.choice(("image", "frames")), *pictures)
        if question.model == "task_head":
            del question.inputs["text_input"], question.texts["text_input"]
            details = {"task": "vqa", "adapter": None, "timings": {"total": 0.5}}
            self._set(question, "text_output", b"<ref>a</ref><box>(1,2),(3,4)</box>")
            self._set(question, "details", json.dumps(details).encode())
        elif question.model != "vision_encoder":
            keys = {"max_tokens": dice.randint(1, 6), "temperature": 0}
            self._set(question, "sampling_parameters", json.dumps(keys).encode())

    @staticmethod
    def _set(question: Question, name: str, *items: bytes) -> None:
        tensor = Tensor.strings(*items)
        if question.model == "vision_encoder":
            tensor.shape = [1, len(items)]
        question.inputs[name] = tensor
        binary = name in ("image", "frames")
        texts = [
            base64.b64encode(item).decode() if binary else item.decode("utf-8", "surrogateescape")
            for item in items
        ]
        question.texts[name] = texts if len(texts) != 1 else texts[0]

    # -- mutations ---------------------------------------------------------------------------

    def _sampling(self, question: Question) -> None:
        names = self.dice.sample(sorted(KEYS), self.dice.randint(1, 3))
        keys = {"max_tokens": 4} | {name: self.dice.choice(KEYS[name]) for name in names}
        self._set(question, "sampling_parameters", json.dumps(keys).encode())

    def _raw_json(self, question: Question) -> None:
        name = "details" if question.model == "task_head" else "sampling_parameters"
        self._set(question, name, self.dice.choice(RAW_JSON).encode())

    def _parameters(self, question: Question) -> None:
        question.inputs.pop("sampling_parameters", None)
        question.texts.pop("sampling_parameters", None)
        for name in self.dice.sample(sorted(KEYS), 2):
            value = self.dice.choice(KEYS[name])
            if (
                isinstance(value, str | bool)
                or (isinstance(value, int) and abs(value) < 2**62)
                or isinstance(value, float)
            ):
                question.parameters[name] = value

    def _chat(self, question: Question) -> None:
        """Replace the text by JSON of messages, with the pictures that it has places for."""
        counts = {"image": 0, "video": 0}

        def part(kind: str) -> dict[str, str]:
            counts[kind] += 1
            return {"type": kind}

        chat = self._messages(part)
        for name, count in (("image", counts["image"]), ("frames", 3 * counts["video"])):
            if count:
                self._set(question, name, *[picture()] * count)
        if self.dice.random() < 0.4:
            self._spoil(chat)
        self._set(question, "text_input", json.dumps(chat).encode())
        if question.model.startswith("lmm") and self.dice.random() < 0.5:
            question.inputs["messages"] = Tensor("BOOL", [1], b"\x01")
            question.texts["messages"] = True
        else:
            self._set(question, "task", b"chat")

    def _image(self, question: Question) -> None:
        name = self.dice.choice(("image", "frames"))
        count = self.dice.choice((0, 1, 1, 1, 2, 3, 65)) if self.dice.random() < 0.15 else 1
        self._set(question, name, *([self._picture()] * count))

    def _picture(self) -> bytes:
        """Return a picture, which may be cut off or changed."""
        dice = self.dice
        data = bytearray(picture((dice.randrange(256), 3, 3), (dice.randint(1, 90), 60)))
        how = dice.randrange(7)
        if how == 0:
            data = data[: dice.randrange(len(data))]
        elif how <= 3:
            for _ in range(dice.randint(1, 20)):
                data[dice.randrange(len(data))] = dice.randrange(256)
        elif how == 4:
            data = bytearray(dice.randbytes(dice.randrange(300)))
        elif how == 5:
            data = bytearray(base64.b64encode(data)[: -dice.randrange(1, 9)])
        return bytes(data)

    def _text(self, question: Question) -> None:
        words = (b"", b" ", b"<image>", b"<image><image>", b"x " * 700, b"</s><s>", *BYTES)
        name = "text_output" if question.model == "task_head" else "text_input"
        self._set(question, name, self.dice.choice(words))

    def _task_and_metadata(self, question: Question) -> None:
        self._set(question, "task", self.dice.choice(TASKS).encode())
        metadata = (b"m", b'{"a": 1}', b"x" * (2**20 + 1), *BYTES)
        self._set(question, "metadata", self.dice.choice(metadata))

    def _features(self, question: Question) -> None:
        dice = self.dice
        rows, width = dice.choice(((64, 192), (63, 192), (0, 192), (64, 191), (1, 1)))
        clip = np.zeros((dice.choice((0, 1, 3)), dice.choice((0, 1, 40)), 30, 3), np.uint8)
        values = np.full((rows, width), dice.choice((0.0, 1e38, np.nan, np.inf)), np.float32)
        row = [0, dice.choice((64, 0, -1, 2**31 - 1)), 1, 8, 8, dice.choice((0, 1, 2))]
        layout = np.array([row] * dice.choice((0, 1, 1, 2)), np.int32).reshape(-1, 6)
        chosen = {
            "image_features": Tensor.array(values, "FP32"),
            "image_layout": Tensor.array(layout, "INT32"),
            "image_size": Tensor.array(np.full((len(layout), 2), -5, np.int32), "INT32"),
            "frames_raw": Tensor.array(clip, "UINT8"),
        }
        for name in dice.sample(sorted(chosen), dice.randint(1, 3)):
            question.inputs[name] = chosen[name]

    def _choose_input(self, question: Question) -> Tensor:
        if not question.inputs:
            self._set(question, "task", b"vqa")
        return question.inputs[self.dice.choice(sorted(question.inputs))]

    def _shape(self, question: Question) -> None:
        tensor = self._choose_input(question)
        shapes = ([], [0], [2], [1, 1], [-1], [1] * 9, [len(tensor.raw)], [0, 2**62], [2**40])
        tensor.shape = self.dice.choice(shapes[: -1 if question.way == "infer" else None])

    def _datatype(self, question: Question) -> None:
        tensor = self._choose_input(question)
        tensor.datatype = self.dice.choice(("BOOL", "INT32", "FP32", "FP64", "UINT8", "BF16", "X"))

    def _bytes(self, question: Question) -> None:
        tensor = self._choose_input(question)
        raw = bytearray(tensor.raw)
        for _ in range(self.dice.randint(1, 6)):
            if raw:
                raw[self.dice.randrange(min(len(raw), 60))] = self.dice.randrange(256)
        cut = self.dice.choice((None, None, 3, len(raw) // 2))
        tensor.raw = bytes(raw[:cut])

    def _flags(self, question: Question) -> None:
        names = ["stream", "exclude_input_in_output", "return_logprobs", "return_finish_reason"]
        names += ["return_cumulative_logprob", "return_num_output_tokens", "cancel", "messages"]
        for name in self.dice.sample(names, 2):
            value = self.dice.random() < 0.5
            question.inputs[name] = Tensor("BOOL", [1], bytes([self.dice.choice((value, 2))]))
            question.texts[name] = value

    def _outputs(self, question: Question) -> None:
        names = OUTPUTS[question.model]
        question.outputs = self.dice.sample(names, self.dice.randint(1, len(names)))
        if self.dice.random() < 0.1:
            question.outputs.append(self.dice.choice(("nothing", question.outputs[0])))

    def _id(self, question: Question) -> None:
        question.id = self.dice.choice(
            ("1", "é" * 20, "x" * 5000, "\u202e\x00", "same-id-always-16")
        )

    def _drop(self, question: Question) -> None:
        name = self.dice.choice(sorted(question.inputs) or ["task"])
        if len(question.inputs) > 1:
            del question.inputs[name]
            question.texts.pop(name, None)

    def _unknown(self, question: Question) -> None:
        self._set(question, self.dice.choice(("picture", "", "TEXT_INPUT", "é")), b"x")

    def _body(self, question: Question) -> None:
        question.body = self._flipped(as_json(question))

    def _flipped(self, content: bytes) -> bytes:
        body = bytearray(content)
        values = self.dice.choice((128, 256))  # All of ASCII, or bytes that are seldom UTF-8.
        for _ in range(self.dice.randint(1, 8)):
            body[self.dice.randrange(len(body))] = self.dice.randrange(values)
        return bytes(body[: self.dice.choice((None, None, len(body) // 2))])


def as_json(question: Question) -> bytes:
    """Return the body for `generate`, `generate_stream` or `infer`."""
    if question.way == "infer":
        inputs = [
            {
                "name": name,
                "shape": tensor.shape,
                "datatype": tensor.datatype,
                "data": _as_list(question.texts.get(name)),
            }
            for name, tensor in question.inputs.items()
        ]
        body: dict[str, Any] = {"inputs": inputs, "parameters": question.parameters}
        if question.outputs:
            body["outputs"] = [{"name": name} for name in question.outputs]
    else:
        body = {**question.texts, **question.parameters}
    if question.id:
        body["id"] = question.id
    return json.dumps(body, ensure_ascii=False).encode("utf-8", "surrogateescape")


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
