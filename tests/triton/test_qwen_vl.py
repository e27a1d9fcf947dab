"""Test of a Qwen-VL checkpoint of the first generation behind a real server."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from PIL import Image

from tests.support.qwen_vl import QUERIES, VISUAL, Reference, make_adapter, make_qwen_vl
from tests.support.triton_client import asking
from vlora.launcher.server import ServerOptions, TritonServer
from vlora.model.tokenizer import load_tokenizer
from vlora.vision.prompts import ChatTemplate, render

MAX_TOKENS = 8


def test_served_text_equals_that_of_the_reference(tmp_path: Path) -> None:
    folder = make_qwen_vl(tmp_path / "model")
    adapter = tmp_path / "adapters" / "tuned"
    make_adapter(adapter, 4, ("attn.c_attn", "attn.c_proj", "mlp.w1", "mlp.w2"))
    reference = Reference(folder, {"tuned": adapter})
    tokenizer, template = load_tokenizer(folder), ChatTemplate.from_checkpoint(folder)
    rng = np.random.default_rng(1)
    pixels = [rng.integers(0, 256, (*size, 3), np.uint8) for size in ((20, 70), (64, 40))]
    files = []
    for rgb in pixels:
        content = io.BytesIO()
        Image.fromarray(rgb).save(content, "PNG")
        files.append(content.getvalue())
    sampling = {"max_tokens": MAX_TOKENS, "ignore_eos": True, "temperature": 0}
    pad = VISUAL["image_start_id"] + 2
    log = tmp_path / "tritonserver.log"
    options = ServerOptions(model=folder, adapters=tmp_path / "adapters", log=log)
    with TritonServer(options) as server, asking(server) as ask:
        for images, frames, name in ((1, 0, None), (1, 1, "tuned"), (2, 0, "tuned"), (0, 2, None)):
            answer = ask.once(
                "video_analytics",
                text_input="what is this?",
                image=files[:images],
                frames=files[2 - frames :],
                sampling_parameters=sampling | ({"lora_name": name} if name else {}),
            )
            ids: list[int] = []
            for token in tokenizer(render("vqa", "what is this?", images, frames, template))[
                "input_ids"
            ]:
                ids += [token] * (QUERIES if token == pad else 1)
            shown = [*pixels[:images], *pixels[2 - frames :]]
            expected = reference.greedy(ids, shown, name, MAX_TOKENS)
            text = tokenizer.decode(expected, skip_special_tokens=True)
            assert answer["text_output"].strip() == text.strip()
