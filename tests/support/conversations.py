"""Conversations of clients of the gateway, the official files with chat templates, and the tokens
that transformers makes of both.

The checkpoints have the files that official ones have: a processor's template, a tokenizer's, or
both, which differ. Their templates have the features of the official ones: content as a string or
in parts, images before the texts or in their places, trimmed texts, a default system message.
"""

from __future__ import annotations

import base64
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tokenizers import processors

from tests.support.checkpoints import VISION_TOKENS
from tests.support.triton_client import png
from vlora.model.tokenizer import load_tokenizer
from vlora.vision.images import DecodedImage

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
    "qwen_vl": (None, None),
}
TEXT_ONLY = ("llama",)
# Families whose official tokenizers put a begin-of-text token before a prompt.
ADDING_BOS = ("llava", "llava_next")
MARKERS, WORD = "</s><|user|> <image> " + VISION_TOKENS[2], "MARKERS"


def use_official_files(folder: Path, family: str) -> Path:
    """Put the chat templates and the tokenizer of a family in the official places of a checkpoint.
    Return its folder."""
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    processor, tokenizer = TEMPLATES[family]
    if processor is not None:
        (folder / "chat_template.json").write_text(json.dumps({"chat_template": processor}))
    if tokenizer is not None:
        file = folder / "tokenizer_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": tokenizer}))
    if family in ADDING_BOS:
        backend = load_tokenizer(folder).backend_tokenizer
        bos = "<s>", backend.token_to_id("<s>")
        backend.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A <s> $B", [bos])
        backend.save(str(folder / "tokenizer.json"))
    return folder


def image(number: int = 0) -> dict[str, Any]:
    """Return a part with a picture, whose size and pixels depend on its number."""
    rng = np.random.default_rng(number)
    content = png(rng.integers(0, 256, (*rng.integers(9, 40, 2), 3), np.uint8))
    url = f"data:image/png;base64,{base64.b64encode(content).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def images_of(messages: list[dict[str, Any]]) -> list[DecodedImage]:
    """Return the pictures of messages, in their order."""
    parts = [part for one in messages for part in one["content"] if isinstance(part, dict)]
    urls = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
    files = [io.BytesIO(base64.b64decode(url.partition(",")[2])) for url in urls]
    return [DecodedImage(np.asarray(Image.open(file))) for file in files]


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
    "markers": [user(image(), text(MARKERS)), says("assistant", "b"), user("c")],
    "markers in an answer": [user(f"{MARKERS}?"), says("assistant", MARKERS), user("c")],
}


def expected_tokens(folder: Path, messages: list[dict[str, Any]], **options: bool) -> list[int]:
    """Return the tokens that transformers' processor or tokenizer makes, one per image.

    MARKERS are a word while the template is applied. They have no special tokens.
    """
    tokenizer = load_tokenizer(folder)
    file = folder / "chat_template.json"
    template = (
        json.loads(file.read_text())["chat_template"] if file.is_file() else tokenizer.chat_template
    )
    kind = _model_type(folder)
    turns = [{**message, "content": _stock(message["content"], kind)} for message in messages]
    options = {"add_generation_prompt": True, **options}
    turns = json.loads(json.dumps(turns).replace(MARKERS, WORD))
    # A processor does these two steps. Those of some families need torchvision.
    prompt = tokenizer.apply_chat_template(turns, chat_template=template, tokenize=False, **options)
    has_bos = kind in TEXT_ONLY or prompt.startswith(tokenizer.bos_token or "no token")
    if WORD not in prompt:
        return list(tokenizer(prompt, add_special_tokens=not has_bos)["input_ids"])
    tokens = list(tokenizer("", add_special_tokens=not has_bos)["input_ids"])
    special = [one.content for one in tokenizer.added_tokens_decoder.values() if one.special]
    for part in re.split(f"({'|'.join(map(re.escape, special))})", prompt):
        tokens += tokenizer(
            part.replace(WORD, MARKERS),
            add_special_tokens=False,
            split_special_tokens=part not in special,
        )["input_ids"]
    return tokens


def _stock(content: Any, model_type: str) -> Any:
    """Return what the template gets. That of Qwen-VL gets the parts, joined by line breaks."""
    if isinstance(content, str):
        return content if model_type in (*TEXT_ONLY, "qwen") else [text(content)]
    if model_type == "qwen":
        return "\n".join(part.get("text", "<img><imgpad></img>") for part in content)
    return [part if part["type"] == "text" else {"type": "image"} for part in content]


def _model_type(folder: Path) -> str:
    return str(json.loads((folder / "config.json").read_text())["model_type"])


def conversation(folder: Path, name: str) -> list[dict[str, Any]]:
    """Return the messages of a conversation. For text-only models, each content is a string."""

    def words(content: Any) -> Any:
        if isinstance(content, str) or _model_type(folder) not in TEXT_ONLY:
            return content
        return "\n".join(part["text"] for part in content if part["type"] == "text")

    turns = CONVERSATIONS[name]
    return [{**message, "content": words(message["content"])} for message in turns]


def options_of(name: str) -> dict[str, bool]:
    """Return the options of a conversation's prompt."""
    return PREFILLED if name.startswith("prefilled") else {}
