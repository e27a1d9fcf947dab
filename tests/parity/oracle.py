"""The slow twin of the engine: stock transformers + PEFT, greedy, fp32, one request at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoTokenizer, LlavaForConditionalGeneration

from vlora.request import FloatArray

NEAR_TIE = 1e-4
"""Two best logits closer than this may change places when a batch changes a sum's order."""


@dataclass(frozen=True)
class Question:
    """pixels: [images, 3, height, width] fp32 or None; the prompt has one placeholder each."""

    prompt: str
    adapter: str | None
    pixels: torch.Tensor | None = field(default=None, repr=False)
    use_head: bool = False


class Oracle:
    """One model with every adapter attached; each call switches to the one it needs."""

    def __init__(self, checkpoint: Path, adapters: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        model = LlavaForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32)
        self._image_token: int = model.config.image_token_id
        self._rows: int = model.config.image_seq_length
        self._adapters = adapters
        folders = sorted(path for path in adapters.iterdir() if path.is_dir())
        self.model = PeftModel.from_pretrained(model, folders[0], adapter_name=_key(folders[0]))
        for folder in folders[1:]:
            self.model.load_adapter(folder, adapter_name=_key(folder))
        self.model.eval()

    def prompt_ids(self, question: Question) -> list[int]:
        """Token ids with each placeholder expanded to the tower's image tokens."""
        ids: list[int] = []
        for token in self.tokenizer(question.prompt, add_special_tokens=False)["input_ids"]:
            ids.extend([token] * (self._rows if token == self._image_token else 1))
        return ids

    @torch.inference_mode()
    def features(self, pixels: torch.Tensor) -> FloatArray:
        """[images, 3, h, w] → [images · rows, hidden], by the stock tower and connector."""
        found = self.model.get_base_model().get_image_features(pixel_values=pixels)
        parts = getattr(found, "pooler_output", found)
        return np.concatenate([part.reshape(-1, part.shape[-1]).numpy() for part in parts])

    @torch.inference_mode()
    def greedy(self, question: Question, max_tokens: int) -> tuple[list[int], list[float]]:
        """(tokens, gap between the two best logits at each)."""
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
        return result.sequences[0, ids.shape[1] :].tolist(), (best[:, 0] - best[:, 1]).tolist()

    @torch.inference_mode()
    def logits(self, question: Question, answer: Sequence[int] = ()) -> torch.Tensor:
        """Teacher-forced: [len(answer) + 1, V], the logits before each token and after the last."""
        ids = torch.tensor([[*self.prompt_ids(question), *answer]])
        with self._using(question.adapter):
            logits = self.model(input_ids=ids, **_pixels(question)).logits[0]
        return logits[-len(answer) - 1 :]

    @torch.inference_mode()
    def head_scores(self, question: Question) -> torch.Tensor:
        """Softmax scores of the adapter's head on the last prompt token's final-norm state."""
        assert question.adapter is not None
        head = load_file(self._adapters / question.adapter / "head.safetensors")
        ids = torch.tensor([self.prompt_ids(question)])
        with self._using(question.adapter):
            base = self.model.get_base_model()
            hidden = base.model(input_ids=ids, **_pixels(question)).last_hidden_state
        return torch.softmax(head["weight"] @ hidden[0, -1] + head["bias"], dim=0)

    @contextmanager
    def _using(self, adapter: str | None) -> Iterator[None]:
        if adapter is None:
            with self.model.disable_adapter():
                yield
        else:
            self.model.set_adapter(_key(self._adapters / adapter))
            yield


def _pixels(question: Question) -> dict[str, torch.Tensor]:
    return {} if question.pixels is None else {"pixel_values": question.pixels}


def _key(folder: Path) -> str:
    """PEFT names modules after adapters; a module's name may not hold a dot."""
    return folder.name.replace(".", "_")


def near_ties(
    oracle: Oracle, question: Question, expected: tuple[list[int], list[float]], got: Sequence[int]
) -> int:
    """How many tokens of `got` differ from the oracle's own choice; each only by a near-tie.

    Raises AssertionError for any other difference: at the first differing token the oracle's two
    best logits must be a near-tie, and the rest is checked teacher-forced.
    """
    tokens, gaps = expected
    assert got, "no token was generated"
    first = next((i for i, (a, b) in enumerate(zip(tokens, got, strict=False)) if a != b), None)
    if first is None:
        assert len(got) == len(tokens), (tokens, got)
        return 0
    assert gaps[first] <= NEAR_TIE, (
        f"token {first}: {got[first]} instead of {tokens[first]}, gap {gaps[first]:.2e}"
    )
    logits = oracle.logits(question, got)
    ties = 0
    for position in range(first, len(got)):
        best = float(logits[position].max())
        behind = best - float(logits[position, got[position]])
        assert behind <= NEAR_TIE, f"token {position} is {behind:.2e} behind the oracle's"
        ties += int(logits[position].argmax()) != got[position]
    return ties
