"""The oracle: correct answers from stock transformers and PEFT, and the permitted differences.

The oracle decodes greedily in float32, one request at a time.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoImageProcessor, AutoTokenizer, LlavaForConditionalGeneration

from tools.demo.heldout import Item
from vlora.request import FloatArray
from vlora.tasks import TASKS
from vlora.vision.chat_template import ChatTemplate
from vlora.vision.families.base import PROCESSOR_BACKEND
from vlora.vision.prompts import render

NEAR_TIE = 1e-4
"""Difference of two logits below which the order of sums may decide which one is larger."""


@dataclass(frozen=True)
class Question:
    """A rendered prompt with one placeholder per image.

    adapter: its name, or None for the base model.
    pixels: preprocessed images, [images, 3, height, width] fp32.
    use_head: whether the adapter's vision task head answers.
    """

    prompt: str
    adapter: str | None
    pixels: torch.Tensor | None = field(default=None, repr=False)
    use_head: bool = False


@dataclass(frozen=True)
class Greedy:
    """The oracle's greedy answer.

    tokens: token ids, including end of text.
    gaps: difference of the two best logits at each token.
    """

    tokens: list[int]
    gaps: list[float]


@dataclass(frozen=True)
class Answer:
    """Answer to an item: the text with its tokens, or a head's best label with all scores."""

    text: str
    greedy: Greedy | None = None
    scores: list[float] | None = None


class Mismatch(AssertionError):
    """Raised if an answer differs from the oracle's by more than near-ties."""


class Oracle:
    """Stock model of a checkpoint. Each call selects its adapter, which is loaded on first use."""

    def __init__(self, checkpoint: str | Path, adapters: str | Path) -> None:
        self._adapters = Path(adapters)
        self._template = ChatTemplate.from_checkpoint(checkpoint)
        self._processor: Any = AutoImageProcessor.from_pretrained(
            checkpoint, backend=PROCESSOR_BACKEND
        )
        self.tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint)
        model = LlavaForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32)
        self.model: Any = model.eval()
        self._image_token: int = model.config.image_token_id
        self._rows: int = model.config.image_seq_length
        self._attached: set[str] = set()

    def prompt_ids(self, question: Question) -> list[int]:
        """Return the token ids, with each placeholder expanded to the image tokens of the tower."""
        ids: list[int] = []
        for token in self.tokenizer(question.prompt, add_special_tokens=False)["input_ids"]:
            ids.extend([token] * (self._rows if token == self._image_token else 1))
        return ids

    @torch.inference_mode()
    def features(self, pixels: torch.Tensor) -> FloatArray:
        """Return the features [images · rows, hidden] of pixels [images, 3, h, w]."""
        output = self._base.get_image_features(pixel_values=pixels)
        parts = getattr(output, "pooler_output", output)
        return np.concatenate([part.reshape(-1, part.shape[-1]).numpy() for part in parts])

    @torch.inference_mode()
    def greedy(self, question: Question, max_tokens: int) -> Greedy:
        """Return the greedy answer to a question."""
        ids = torch.tensor([self.prompt_ids(question)])
        with self._using(question.adapter):
            result = self.model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                **_pixels(question),
                do_sample=False,
                max_new_tokens=max_tokens,
                output_logits=True,
                return_dict_in_generate=True,
            )
        best = torch.stack(result.logits)[:, 0].topk(2, dim=-1).values
        gaps = (best[:, 0] - best[:, 1]).tolist()
        return Greedy(result.sequences[0, ids.shape[1] :].tolist(), gaps)

    @torch.inference_mode()
    def logits(self, question: Question, answer: Sequence[int] = ()) -> torch.Tensor:
        """Return the logits before each token of `answer` and after the last one, teacher-forced.

        Shape [len(answer) + 1, V].
        """
        ids = torch.tensor([[*self.prompt_ids(question), *answer]])
        with self._using(question.adapter):
            logits = self.model(input_ids=ids, **_pixels(question)).logits[0]
        return logits[-len(answer) - 1 :]

    @torch.inference_mode()
    def head_scores(self, question: Question) -> torch.Tensor:
        """Return the softmax scores of the adapter's head, [classes].

        The head's input is the final hidden state of the last prompt token, after the norm.
        """
        assert question.adapter is not None
        head = load_file(self._adapters / question.adapter / "head.safetensors")
        ids = torch.tensor([self.prompt_ids(question)])
        with self._using(question.adapter):
            hidden = self._base.model(input_ids=ids, **_pixels(question)).last_hidden_state
        return torch.softmax(head["weight"] @ hidden[0, -1] + head["bias"], dim=0)

    def near_ties(self, question: Question, expected: Greedy, got: Sequence[int]) -> int:
        """Return how many tokens of `got` differ from the oracle's choice by a near-tie.

        At the first difference the oracle's two best logits must be a near-tie. From there on, each
        token is compared with the oracle's logits for the tokens before it. Raise Mismatch for any
        other difference.
        """
        pairs = enumerate(zip(expected.tokens, got, strict=False))
        first = next((i for i, (theirs, ours) in pairs if theirs != ours), None)
        if first is None:
            if len(got) != len(expected.tokens):
                raise Mismatch(f"{len(got)} tokens instead of {len(expected.tokens)}: {got}")
            return 0
        if expected.gaps[first] > NEAR_TIE:
            raise Mismatch(
                f"token {first}: {got[first]} instead of {expected.tokens[first]},"
                f" gap {expected.gaps[first]:.2e}"
            )
        logits = self.logits(question, got)
        ties = 0
        for position in range(first, len(got)):
            gap = float(logits[position].max() - logits[position, got[position]])
            if gap > NEAR_TIE:
                raise Mismatch(
                    f"token {position}: its logit is {gap:.2e} below the oracle's best; the limit"
                    f" is {NEAR_TIE:.0e}"
                )
            ties += int(logits[position].argmax()) != got[position]
        return ties

    def question(self, item: Item, adapter: str | None) -> Question:
        """Return the question of a client's item, with rendered prompt and preprocessed images."""
        files = item.images + item.frames
        prompt = render(item.task, item.text, len(item.images), len(item.frames), self._template)
        tasks = self.adapter_info(adapter).get("head", {}).get("tasks", []) if adapter else []
        return Question(prompt, adapter, self._preprocess(files), item.task in tasks)

    def answer(self, item: Item, adapter: str | None) -> Answer:
        """Return an adapter's or the base's answer to an item, up to the task's token limit."""
        question = self.question(item, adapter)
        if question.use_head:
            scores = self.head_scores(question)
            labels = self.adapter_info(question.adapter)["head"]["labels"]
            return Answer(labels[int(scores.argmax())], scores=scores.tolist())
        greedy = self.greedy(question, TASKS[item.task].max_tokens)
        text = self.tokenizer.decode(greedy.tokens, skip_special_tokens=True)
        return Answer(text, greedy)

    def text_ties(self, item: Item, adapter: str | None, answer: Answer, text: str) -> int:
        """Return `near_ties` for an answer of which only the text is known."""
        if text == answer.text or answer.greedy is None:
            return 0
        got = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(got) < TASKS[item.task].max_tokens:
            got.append(self.tokenizer.eos_token_id)
        return self.near_ties(self.question(item, adapter), answer.greedy, got)

    def adapter_info(self, adapter: str | None) -> dict[str, Any]:
        """Return the content of an adapter's vlora.json."""
        text = (self._adapters / str(adapter) / "vlora.json").read_text(encoding="utf-8")
        parsed: dict[str, Any] = json.loads(text)
        return parsed

    def attach(self, adapter: str) -> None:
        """Load an adapter unless it is loaded."""
        if adapter in self._attached:
            return
        folder = str(self._adapters / adapter)
        if self._attached:
            self.model.load_adapter(folder, adapter_name=_key(adapter))
        else:
            self.model = PeftModel.from_pretrained(self.model, folder, adapter_name=_key(adapter))
        self.model.eval()
        self._attached.add(adapter)

    def _preprocess(self, files: Sequence[bytes]) -> torch.Tensor | None:
        if not files:
            return None
        pictures = [Image.open(io.BytesIO(data)).convert("RGB") for data in files]
        pixels: torch.Tensor = self._processor(pictures, return_tensors="pt")["pixel_values"]
        return pixels

    @property
    def _base(self) -> Any:
        return self.model.get_base_model() if self._attached else self.model

    @contextmanager
    def _using(self, adapter: str | None) -> Iterator[None]:
        if adapter is not None:
            self.attach(adapter)
            self.model.set_adapter(_key(adapter))
            yield
        elif self._attached:
            with self.model.disable_adapter():
                yield
        else:
            yield


def _pixels(question: Question) -> dict[str, torch.Tensor]:
    return {} if question.pixels is None else {"pixel_values": question.pixels}


def _key(adapter: str) -> str:
    """Return PEFT's name of an adapter, which must not contain a dot."""
    return adapter.replace(".", "_")
