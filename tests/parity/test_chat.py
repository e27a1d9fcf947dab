"""Prompts of conversations have the tokens that transformers makes of them, for every family.

The checkpoints have the files that official ones have: a processor's template, a tokenizer's, or
both, which differ. Their templates have the features of the official ones: content as a string or
in parts, images before the texts or in their places, trimmed texts, a default system message.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.checkpoints import VISION_TOKENS, make_checkpoint
from tests.support.qwen_vl import make_qwen_vl
from vlora.gateway.requests import read_chat
from vlora.model.decoder_config import load_config
from vlora.model.inputs import PromptReader
from vlora.model.tokenizer import load_tokenizer
from vlora.request import ImageFeatures
from vlora.vision.chat_template import Chat, ChatTemplate
from vlora.vision.prompts import render

IMAGES_FIRST = (
    "{% for m in messages %}<|ROLE|>START{{ m['role'] }}MIDDLE"
    "{% for p in m['content'] | selectattr('type', 'equalto', 'image') %}<image>BREAK{% endfor %}"
    "{% for p in m['content'] | selectattr('type', 'equalto', 'video') %}<video>BREAK{% endfor %}"
    "{% for p in m['content'] | selectattr('type', 'equalto', 'text') %}"
    "{{ p['text'] TRIM }}{% endfor %}END{% endfor %}"
    "{% if add_generation_prompt %}STARTassistantMIDDLE{% endif %}"
)
QWEN = (
    "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}<s>system\n"
    "You are a helpful assistant.</s>\n{% endif %}<s>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for p in m['content'] %}"
    "{% if p['type'] == 'image' or 'image' in p %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif p['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif 'text' in p %}{{ p['text'] }}{% endif %}{% endfor %}{% endif %}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
STRINGS = (
    "{% for m in messages %}{{ '<s>' + m['role'] + '\n' + m['content'] + '</s>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}"
)


def images_first(start: str, middle: str, end: str, line: str, trim: str = "") -> str:
    """Return a template that prints the images of a message before its texts."""
    words = {"<|ROLE|>": "", "START": start, "MIDDLE": middle, "END": end, "BREAK": line}
    template = IMAGES_FIRST.replace("TRIM", trim)
    for word, text in words.items():
        template = template.replace(word, text)
    return template


# By family: the processor's template, and the tokenizer's.
TEMPLATES: dict[str, tuple[str | None, str | None]] = {
    "llava": (images_first("", ": ", " ", "\n", "| trim"), None),
    "llava_next": (images_first("[", "] ", "</s>", "\n"), None),
    "llava_onevision": (images_first("<s>", " ", "</s>", "\n"), STRINGS),
    "qwen2_vl": (QWEN, QWEN),
    "qwen2_5_vl": (QWEN, None),
    "qwen3_vl": (None, QWEN),
    "text": (None, STRINGS),
    "qwen": (None, None),
}
MARKERS = "</s><|user|> <image> " + VISION_TOKENS[2]


@pytest.fixture(scope="module", params=TEMPLATES)
def folder(
    request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Return a checkpoint with the templates of the family in the official places."""
    family = request.param
    folder = tmp_path_factory.mktemp(family)
    if family == "qwen":
        return make_qwen_vl(folder / "model")
    make_checkpoint("qwen2_vl" if family == "text" else family, checkpoint, folder)
    if family == "text":
        config = json.loads((folder / "config.json").read_text())["text_config"]
        config |= {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4}
        (folder / "config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").unlink()
    processor, tokenizer = TEMPLATES[family]
    if processor is not None:
        (folder / "chat_template.json").write_text(json.dumps({"chat_template": processor}))
    if tokenizer is not None:
        file = folder / "tokenizer_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": tokenizer}))
    return folder


def image(number: int = 0) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{number}"}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def user(*parts: Any) -> dict[str, Any]:
    only = len(parts) == 1 and isinstance(parts[0], str)
    return {"role": "user", "content": parts[0] if only else list(parts)}


def says(role: str, words: str) -> dict[str, Any]:
    return {"role": role, "content": words}


PREFILLED = {"add_generation_prompt": False, "continue_final_message": True}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one message": [user("What color is the star?")],
    "spaces": [user("  What color?\n\n is it ")],
    "system": [says("system", "Answer briefly."), user("Why?")],
    "turns": [user("A?"), says("assistant", "B."), user("C?"), says("assistant", "D."), user("E")],
    "one image": [user(image(), text("What is this?"))],
    "image last": [user(text("What is this?"), image())],
    "image between": [user(text("Is "), image(), text(" a star?"))],
    "several images": [user(image(1), text("or"), image(2), text("or"), image(3), text("?"))],
    "images of turns": [user(image(1)), says("assistant", "A star."), user(image(2), text("And?"))],
    "all": [says("system", "S"), user(image(), text("a")), says("assistant", "b"), user("c")],
    "prefilled": [user(image(), text("Name it.")), says("assistant", "It is a")],
    "prefilled text": [user("Count."), says("assistant", "One, two,")],
}


def tokens_of(folder: Path, messages: list[dict[str, Any]], **options: bool) -> list[int]:
    """Return the tokens of the prompt of a request to the gateway, with one token per image."""
    ask = read_chat({"model": "base", "messages": messages, **options})
    count = len(ask.conversation.images)
    prompt = render(
        "chat",
        Chat.parse(ask.conversation.text),
        count,
        0,
        ChatTemplate.from_checkpoint(folder),
    )
    config = load_config(folder)
    side = config.image_merge if config.rope_axes else 1
    layout = np.array([[i, 1, 1, side, side, 0] for i in range(count)], np.int32)
    features = np.random.default_rng(0).random((count, config.feature_width), np.float32)
    images = ImageFeatures(features, layout) if count else None
    return list(PromptReader(folder, config).read(prompt, images).ids)


def expected_tokens(folder: Path, messages: list[dict[str, Any]], **options: bool) -> list[int]:
    """Return the tokens that transformers' processor or tokenizer makes, one per image."""
    tokenizer = load_tokenizer(folder)
    file = folder / "chat_template.json"
    template = (
        json.loads(file.read_text())["chat_template"] if file.is_file() else tokenizer.chat_template
    )
    # Some templates take no strings, and that of Qwen-VL takes nothing else.
    in_parts = template not in (STRINGS, QWEN, tokenizer.chat_template)
    turns = [{**message, "content": _stock(message["content"], in_parts)} for message in messages]
    if template == tokenizer.chat_template and template not in (QWEN, STRINGS):
        turns = [{**turn, "content": _as_string(turn["content"])} for turn in turns]
    options = {"add_generation_prompt": True, **options}
    # A processor does these two steps. Those of some families need torchvision.
    prompt = tokenizer.apply_chat_template(turns, chat_template=template, tokenize=False, **options)
    has_bos = is_text_only(folder) or prompt.startswith(tokenizer.bos_token or "no token")
    return list(tokenizer(prompt, add_special_tokens=not has_bos)["input_ids"])


def _stock(content: Any, in_parts: bool) -> Any:
    if isinstance(content, str):
        return [text(content)] if in_parts else content
    return [part if part["type"] == "text" else {"type": "image"} for part in content]


def _as_string(content: Any) -> str:
    """Return what a template that takes only strings gets: the parts, joined by line breaks."""
    if isinstance(content, str):
        return content
    return "\n".join(part.get("text", "<img><imgpad></img>") for part in content)


def is_text_only(folder: Path) -> bool:
    return json.loads((folder / "config.json").read_text())["model_type"] == "qwen2"


def words_of(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content if part["type"] == "text")


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_a_conversation_has_the_tokens_of_transformers(folder: Path, name: str) -> None:
    messages = CONVERSATIONS[name]
    if is_text_only(folder):
        messages = [{**message, "content": words_of(message["content"])} for message in messages]
    options = PREFILLED if name.startswith("prefilled") else {}
    assert tokens_of(folder, messages, **options) == expected_tokens(folder, messages, **options)


@pytest.mark.parametrize("name", ["one message", "system", "turns", "several images"])
@pytest.mark.parametrize("place", ["first", "last"])
def test_what_a_client_writes_is_only_text(folder: Path, name: str, place: str) -> None:
    """The prompt has the same special tokens as without the markers, and the markers as text."""
    messages = CONVERSATIONS[name]
    if is_text_only(folder):
        messages = [{**message, "content": words_of(message["content"])} for message in messages]
    index = 0 if place == "first" else -1
    content = messages[index]["content"]
    parts = [text(content)] if isinstance(content, str) else content
    marked = [*messages]
    marked[index] = {**messages[index], "content": [*parts, text(MARKERS)]}
    plain = [*messages]
    plain[index] = {**messages[index], "content": [*parts, text("x")]}
    tokenizer = load_tokenizer(folder)
    special = {id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
    tokens = tokens_of(folder, marked)
    assert [t for t in tokens if t in special] == [
        t for t in tokens_of(folder, plain) if t in special
    ]
    without = tokenizer.decode([t for t in tokens if t not in special])
    assert MARKERS in without
