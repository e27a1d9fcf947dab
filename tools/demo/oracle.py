"""The slow oracle: stock transformers and PEFT, greedy, float32, one request at a time.

What the engine answers is right when it is what this answers.
"""

import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoImageProcessor, AutoTokenizer, LlavaForConditionalGeneration

from tools.demo.heldout import Item
from vlora.vision.prompts import PLACEHOLDER, TASK_DEFAULT_MAX_TOKENS, ChatTemplate, render


@dataclass(frozen=True)
class Answer:
    """`token_ids` are the generated ones, end of text included. `scores` [classes] by a head."""

    token_ids: list[int]
    text: str
    scores: list[float] | None = None
    margins: tuple[float, ...] = ()


@dataclass(frozen=True)
class Request:
    """A finished prompt with its encoded images; `choices` limits the answer to a closed set."""

    prompt: str
    images: list[bytes]
    adapter: str | None = None
    max_tokens: int = 16
    head: bool = False
    choices: tuple[str, ...] = ()


class Oracle:
    """Owns one model; adapters are loaded when first asked for and stay."""

    def __init__(self, checkpoint: str | Path, adapters_dir: str | Path) -> None:
        self.adapters_dir = Path(adapters_dir)
        self.template = ChatTemplate.from_checkpoint(checkpoint)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint)
        self.processor: Any = AutoImageProcessor.from_pretrained(checkpoint)
        base = LlavaForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32)
        self.model: Any = base.eval()
        self.image_tokens = int(base.config.image_seq_length)
        self.loaded: set[str] = set()

    def answer(self, asked: Item | Request, adapter: str | None = "its own") -> Answer:
        """Answer an item (by its own adapter unless told otherwise) or a finished request."""
        request = self.request_of(asked, adapter) if isinstance(asked, Item) else asked
        with torch.inference_mode():
            inputs = self._inputs(request)
            if request.adapter is None:
                if not self.loaded:
                    return self._generate(inputs, request)
                with self.model.disable_adapter():
                    return self._generate(inputs, request)
            self._select(request.adapter)
            if request.head:
                return self._read_head(inputs, request.adapter)
            return self._generate(inputs, request)

    def request_of(self, item: Item, adapter: str | None = "its own") -> Request:
        """Return the request a client's item becomes, prompt rendered."""
        chosen = item.adapter if adapter == "its own" else adapter
        about = self.about(chosen) if chosen else {}
        prompt = render(item.task, item.text, len(item.images), len(item.frames), self.template)
        return Request(
            prompt=prompt,
            images=item.images + item.frames,
            adapter=chosen,
            max_tokens=TASK_DEFAULT_MAX_TOKENS[item.task],
            head=item.task in about.get("head", {}).get("tasks", []),
        )

    def about(self, adapter: str) -> dict[str, Any]:
        """Return an adapter's vlora.json."""
        import json

        text = (self.adapters_dir / adapter / "vlora.json").read_text(encoding="utf-8")
        parsed: dict[str, Any] = json.loads(text)
        return parsed

    def _select(self, adapter: str) -> None:
        folder = str(self.adapters_dir / adapter)
        if not self.loaded:
            self.model = PeftModel.from_pretrained(self.model, folder, adapter_name=adapter).eval()
        elif adapter not in self.loaded:
            self.model.load_adapter(folder, adapter_name=adapter)
        self.loaded.add(adapter)
        self.model.set_adapter(adapter)

    def _inputs(self, request: Request) -> dict[str, Tensor]:
        expanded = request.prompt.replace(PLACEHOLDER, PLACEHOLDER * self.image_tokens)
        inputs = dict(self.tokenizer(expanded, add_special_tokens=False, return_tensors="pt"))
        inputs.pop("token_type_ids", None)
        if request.images:
            pictures = [Image.open(io.BytesIO(data)).convert("RGB") for data in request.images]
            inputs["pixel_values"] = self.processor(pictures, return_tensors="pt")["pixel_values"]
        return inputs

    def _generate(self, inputs: dict[str, Tensor], request: Request) -> Answer:
        made = self.model.generate(
            **inputs,
            max_new_tokens=request.max_tokens,
            do_sample=False,
            prefix_allowed_tokens_fn=self._only(request.choices, inputs["input_ids"].shape[1]),
            output_logits=True,
            return_dict_in_generate=True,
        )
        ids = made.sequences[0, inputs["input_ids"].shape[1] :].tolist()
        best = [logits[0].topk(2).values for logits in made.logits]
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        return Answer(ids, text, margins=tuple(float(two[0] - two[1]) for two in best))

    def _only(self, choices: tuple[str, ...], start: int) -> Callable[..., list[int]] | None:
        """Allow only tokens that continue one of the choices."""
        if not choices:
            return None
        spelt = [
            [*self.tokenizer(choice, add_special_tokens=False).input_ids, self._end]
            for choice in choices
        ]

        def allowed(_: int, ids: Tensor) -> list[int]:
            done = ids[start:].tolist()
            more = {s[len(done)] for s in spelt if len(s) > len(done) and s[: len(done)] == done}
            return sorted(more) or [self._end]

        return allowed

    @property
    def _end(self) -> int:
        return int(self.tokenizer.eos_token_id)

    def _read_head(self, inputs: dict[str, Tensor], adapter: str) -> Answer:
        head = load_file(self.adapters_dir / adapter / "head.safetensors")
        hidden = self.model.model.model(**inputs, use_cache=False).last_hidden_state[0, -1]
        scores = head["weight"] @ hidden + head["bias"]
        labels = self.about(adapter)["head"]["labels"]
        return Answer([], labels[int(scores.argmax())], scores.tolist())
