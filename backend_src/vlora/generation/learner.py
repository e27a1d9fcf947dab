"""Model under training: a frozen base with a LoRA adapter and, for some items, a task head.

The vision tower and the connector are frozen, so image features are computed once and cached.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import peft
import torch
from cachetools import LRUCache, cachedmethod
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoImageProcessor, AutoTokenizer, LlavaForConditionalGeneration

from vlora.adapters.files import WEIGHTS
from vlora.generation.examples import Example
from vlora.generation.spec import Item, Training
from vlora.model.tokenizer import control_tokens
from vlora.tasks import TASKS
from vlora.vision.chat_template import ChatTemplate
from vlora.vision.families.base import PROCESSOR_BACKEND
from vlora.vision.pictures import open_file
from vlora.vision.prompts import render

IGNORED = -100
# Longest row of a batch, divided by its shortest. Longer rows get another batch, so that questions
# about one image are not padded to the length of a clip.
LENGTH_RATIO = 2
HEAD_STATE = "head.json"
MAX_TEXTS = 1 << 16  # Maximum number of texts whose tokens are cached.
MERGE_DENSITY = 0.5  # Share of the weights that the merging methods TIES and DARE keep.


@dataclass(frozen=True)
class Row:
    """One example as token ids. `label`: class of a vision task head, None for the LM head."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    images: tuple[Path, ...]
    label: int | None = None


@dataclass
class Batch:
    """Rows of one training step, padded on the right.

    tokens: [rows, length] token ids.
    targets: [rows, length] token ids of the LM head's answers; IGNORED everywhere else.
    mask: [rows, length], 1 for tokens and 0 for padding.
    ends: [rows], position of each prompt's last token.
    labels: [rows], class of the vision task head; IGNORED for rows of the LM head.
    features: [image tokens of all rows, hidden].
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    mask: torch.Tensor
    ends: torch.Tensor
    labels: torch.Tensor
    features: torch.Tensor


class Base:
    """The frozen base of a run: model, tokenizer, prompts and image features."""

    def __init__(
        self, checkpoint: Path, cache_mib: int, device: torch.device, *, fast_attention: bool = True
    ) -> None:
        """Load the checkpoint onto `device`, with at most `cache_mib` MiB of cached features.

        fast_attention: whether to fuse attention also on a CPU, where its bf16 gradient is slow.
        """
        self.device = device
        self.tokenizer: Any = AutoTokenizer.from_pretrained(
            checkpoint, local_files_only=True, trust_remote_code=False
        )
        self._template = ChatTemplate.from_checkpoint(checkpoint)
        self._processor: Any = AutoImageProcessor.from_pretrained(
            checkpoint, backend=PROCESSOR_BACKEND, local_files_only=True, trust_remote_code=False
        )
        self.model: Any = LlavaForConditionalGeneration.from_pretrained(
            checkpoint,
            dtype=torch.float32,
            local_files_only=True,
            trust_remote_code=False,
            attn_implementation="sdpa" if fast_attention or device.type != "cpu" else "eager",
        ).to(device)
        self.model.eval().requires_grad_(False)
        self._tokens: LRUCache[tuple[str], tuple[int, ...]] = LRUCache(MAX_TEXTS)
        self._features: LRUCache[Path, torch.Tensor] = LRUCache(
            max(1, cache_mib) << 20, getsizeof=lambda value: value.nbytes
        )

    @property
    def hidden(self) -> int:
        """Width of the decoder."""
        return int(self.model.config.text_config.hidden_size)

    def row(self, item: Item, example: Example, labels: Sequence[str]) -> Row:
        """Return an example as tokens, for a head over these labels, or else for the LM head."""
        images, frames = len(example.images), 0
        if item.task == "video":
            images, frames = frames, images
        text = render(item.task, example.question, images, frames, self._template)
        answer = (*self._ids(example.answer), self.tokenizer.eos_token_id)
        label = labels.index(example.answer) if labels else None
        return Row(tuple(self._prompt_ids(text)), answer, example.images, label)

    @cachedmethod(attrgetter("_tokens"))
    def _ids(self, text: str) -> tuple[int, ...]:
        # Cached, because items and evaluations repeat texts.
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _prompt_ids(self, text: str) -> Iterable[int]:
        """Yield the token ids of a prompt, with its placeholders expanded to image tokens."""
        config = self.model.config
        for token in self._ids(text):
            yield from [token] * (config.image_seq_length if token == config.image_token_id else 1)

    @torch.inference_mode()
    def features(self, paths: Iterable[Path]) -> torch.Tensor:
        """Return the features of images, [tokens of all images, hidden] fp32, on the device."""
        paths = list(paths)
        found = {path: self._features[path] for path in paths if path in self._features}
        missing = [path for path in dict.fromkeys(paths) if path not in found]
        if missing:
            pictures = [open_file(path).convert("RGB") for path in missing]
            pixels = self._processor(pictures, return_tensors="pt")["pixel_values"].to(self.device)
            output = self.model.get_image_features(pixel_values=pixels)
            for path, part in zip(missing, getattr(output, "pooler_output", output), strict=True):
                found[path] = part.reshape(-1, part.shape[-1]).cpu()
                if found[path].nbytes <= self._features.maxsize:
                    self._features[path] = found[path]
        if not paths:
            return torch.zeros(0, self.hidden, device=self.device)
        return torch.cat([found[path] for path in paths]).to(self.device)

    def batches(self, rows: Sequence[Row]) -> list[Batch]:
        """Return batches of rows with similar lengths (see LENGTH_RATIO)."""
        groups: list[list[Row]] = []
        for row in sorted(rows, key=_length):
            if not groups or _length(row) > LENGTH_RATIO * _length(groups[-1][0]):
                groups.append([])
            groups[-1].append(row)
        return [self._batch(group) for group in groups]

    def _batch(self, rows: Sequence[Row]) -> Batch:
        tokens = torch.zeros(len(rows), max(map(_length, rows)), dtype=torch.long)
        targets = torch.full_like(tokens, IGNORED)
        mask = torch.zeros_like(tokens)
        for index, row in enumerate(rows):
            start, end = len(row.prompt), len(row.prompt) + len(row.answer)
            tokens[index, :end] = torch.tensor([*row.prompt, *row.answer])
            mask[index, :end] = 1
            if row.label is None:
                targets[index, start:end] = torch.tensor(row.answer)
        labels = [IGNORED if row.label is None else row.label for row in rows]
        return Batch(
            tokens.to(self.device),
            targets.to(self.device),
            mask.to(self.device),
            torch.tensor([len(row.prompt) - 1 for row in rows], device=self.device),
            torch.tensor(labels, device=self.device),
            self.features(path for row in rows for path in row.images),
        )


def _length(row: Row) -> int:
    return len(row.prompt) + len(row.answer)


class Learner(nn.Module):
    """The frozen base with one adapter to train, and a head over `labels` if there are any."""

    def __init__(self, base: Base, training: Training, labels: Sequence[str], seed: int) -> None:
        super().__init__()
        self.base = base
        self.labels = list(labels)
        torch.manual_seed(seed)
        names = "|".join(training.targets)
        config = peft.LoraConfig(
            r=training.rank,
            lora_alpha=training.alpha or 2 * training.rank,
            target_modules=rf".*language_model\.layers\.\d+\.(self_attn|mlp)\.({names})",
            lora_dropout=0.0,
            bias="none",
            task_type="CAUSAL_LM",
        )
        self.adapted: peft.PeftModel = peft.get_peft_model(base.model, config)
        self.head = nn.Linear(base.hidden, len(labels)).to(base.device) if labels else None
        if self.head is not None:
            nn.init.normal_(self.head.weight, std=0.02)
            nn.init.zeros_(self.head.bias)

    def release(self) -> None:
        """Remove the adapter from the shared base."""
        self.adapted.unload()

    def load(self, folder: Path) -> None:
        """Load the weights of an earlier adapter and its head, whose labels are all in `labels`."""
        peft.set_peft_model_state_dict(self.adapted, load_file(folder / WEIGHTS))
        self._load_head(folder)

    def load_merged(self, folders: Sequence[Path], method: str) -> None:
        """Load the merge of adapters of this rank, each with weight 1, by PEFT's method."""
        config = self.adapted.peft_config["default"]
        names = [f"part{number}" for number in range(len(folders))]
        for name, folder in zip(names, folders, strict=True):
            self.adapted.add_adapter(name, config)
            peft.set_peft_model_state_dict(
                self.adapted, load_file(folder / WEIGHTS), adapter_name=name
            )
            self._load_head(folder)
        self.adapted.add_weighted_adapter(
            names,
            [1.0] * len(names),
            "merged",
            combination_type=method,
            svd_rank=config.r,
            density=MERGE_DENSITY if method != "svd" else None,
        )
        state = peft.get_peft_model_state_dict(self.adapted, adapter_name="merged")
        # PEFT's merged adapter has the scale 1, but this adapter keeps its own scale.
        scale = config.lora_alpha / config.r
        state = {key: t / scale if ".lora_B." in key else t for key, t in state.items()}
        for name in (*names, "merged"):
            self.adapted.delete_adapter(name)
        self.adapted.set_adapter("default")
        peft.set_peft_model_state_dict(self.adapted, state)

    def _load_head(self, folder: Path) -> None:
        if (folder / HEAD_STATE).is_file() and self.head is not None:
            known = json.loads((folder / HEAD_STATE).read_text())
            head = load_file(folder / "head.safetensors")
            with torch.no_grad():
                for row, label in enumerate(known):
                    target = self.labels.index(label)
                    self.head.weight[target] = head["weight"][row].to(self.base.device)
                    self.head.bias[target] = head["bias"][row].to(self.base.device)

    def save(self, folder: Path) -> None:
        """Write the adapter in fp32 in PEFT's format, and the head with its labels."""
        self.adapted.save_pretrained(folder, save_embedding_layers=False)
        (folder / "README.md").unlink(missing_ok=True)
        if self.head is not None:
            tensors = {"weight": self.head.weight, "bias": self.head.bias}
            save_file(
                {name: tensor.detach().float().cpu() for name, tensor in tensors.items()},
                folder / "head.safetensors",
            )
            (folder / HEAD_STATE).write_text(json.dumps(self.labels))

    def forward(self, batches: Sequence[Batch]) -> torch.Tensor:
        """Return the mean cross entropy of the rows (§4.2.1, L = CE(y, ŷ)), equally weighted."""
        losses = [self._loss(batch) for batch in batches]
        return torch.stack(losses).sum() / sum(len(batch.tokens) for batch in batches)

    def _loss(self, batch: Batch) -> torch.Tensor:
        hidden = self._hidden(batch.tokens, batch.mask, batch.features)
        shifted = batch.targets[:, 1:]
        asked = shifted != IGNORED
        losses = []
        if asked.any():
            logits = self.base.model.lm_head(hidden[:, :-1][asked])
            token = nn.functional.cross_entropy(logits.float(), shifted[asked], reduction="none")
            weight = (1 / asked.sum(1).clamp(min=1))[:, None].expand_as(asked)[asked]
            losses.append((token * weight).sum())
        of_head = batch.labels != IGNORED
        if self.head is not None and of_head.any():
            last = hidden[of_head, batch.ends[of_head]]
            logits = self.head(last.to(self.head.weight.dtype)).float()
            labels = batch.labels[of_head]
            losses.append(nn.functional.cross_entropy(logits, labels, reduction="sum"))
        return torch.stack(losses).sum()

    def _embedded(self, tokens: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = self.base.model.get_input_embeddings()(tokens)
        places = (tokens == self.base.model.config.image_token_id)[..., None].expand_as(embedded)
        return embedded.masked_scatter(places, features.to(embedded.dtype))

    def _hidden(
        self, tokens: torch.Tensor, mask: torch.Tensor, features: torch.Tensor
    ) -> torch.Tensor:
        """Return the hidden states after the final norm, [rows, length, hidden]."""
        output = self.base.model.model.language_model(
            inputs_embeds=self._embedded(tokens, features), attention_mask=mask, use_cache=False
        )
        hidden: torch.Tensor = output.last_hidden_state
        return hidden

    @torch.inference_mode()
    def answer(self, rows: Sequence[Row], task: str) -> list[str]:
        """Return the answers: the head's best labels, or else greedily decoded texts."""
        length = max(len(row.prompt) for row in rows)
        tokens = torch.zeros(len(rows), length, dtype=torch.long, device=self.base.device)
        mask = torch.zeros_like(tokens)
        for index, row in enumerate(rows):  # Left padding makes all prompts end together.
            tokens[index, length - len(row.prompt) :] = torch.tensor(row.prompt)
            mask[index, length - len(row.prompt) :] = 1
        features = self.base.features(path for row in rows for path in row.images)
        if rows[0].label is not None:
            assert self.head is not None
            last = self._hidden(tokens, mask, features)[:, -1]
            return [self.labels[index] for index in self.head(last).argmax(-1).tolist()]
        generated = self.base.model.generate(
            inputs_embeds=self._embedded(tokens, features),
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=TASKS[task].max_tokens,
        )
        hidden = control_tokens(self.base.tokenizer)
        shown = ([token for token in row if token not in hidden] for row in generated.tolist())
        texts: list[str] = self.base.tokenizer.batch_decode(list(shown))
        return texts
