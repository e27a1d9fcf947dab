"""Prompts of conversations have the tokens that transformers makes of them, for every family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.checkpoints import make_checkpoint
from tests.support.conversations import (
    CONVERSATIONS,
    MARKERS,
    TEMPLATES,
    conversation,
    expected_tokens,
    options_of,
    text,
    use_official_files,
)
from tests.support.logits import save_decoder
from tests.support.qwen_vl import make_qwen_vl
from vlora.gateway.requests import read_chat
from vlora.model.decoder_config import load_config
from vlora.model.inputs import PromptReader
from vlora.model.tokenizer import load_tokenizer
from vlora.request import ImageFeatures
from vlora.vision.chat_template import Chat, ChatTemplate
from vlora.vision.prompts import render


@pytest.fixture(scope="module", params=TEMPLATES)
def folder(
    request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Return a checkpoint with the templates of the family in the official places."""
    family = request.param
    folder = tmp_path_factory.mktemp(family) / "model"
    if family == "qwen_vl":
        return make_qwen_vl(folder)
    if family == "text":
        save_decoder(checkpoint, folder)
    else:
        make_checkpoint(family, checkpoint, folder)
    return use_official_files(folder, family)


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


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_a_conversation_has_the_tokens_of_transformers(folder: Path, name: str) -> None:
    messages, options = conversation(folder, name), options_of(name)
    assert tokens_of(folder, messages, **options) == expected_tokens(folder, messages, **options)


@pytest.mark.parametrize("name", ["one message", "system", "turns", "several images"])
@pytest.mark.parametrize("place", ["first", "last"])
def test_what_a_client_writes_is_only_text(folder: Path, name: str, place: str) -> None:
    """The prompt has the same special tokens as without the markers, and the markers as text."""
    messages = conversation(folder, name)
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
