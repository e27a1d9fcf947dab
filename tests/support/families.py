"""A checkpoint of one vision family with adapters. Its stock model is the oracle."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import groupby, repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.variants import calculate_alora_offsets
from PIL import Image
from transformers import (
    AutoImageProcessor,
    AutoModelForImageTextToText,
    AutoTokenizer,
    Qwen3VLProcessor,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
    Qwen2VLImageProcessorPil,
    smart_resize,
)
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as qwen3_resize

from tests.support import qwen_vl
from tests.support.checkpoints import FAMILIES, make_checkpoint
from tests.support.conversations import use_official_files
from tests.support.qwen_vl import IMAGE_PAD, QUERIES, Reference, make_adapter, make_qwen_vl
from vlora.model.tokenizer import load_tokenizer
from vlora.vision.encoder import VisionEncoder
from vlora.vision.features import EncoderService, FeatureCache
from vlora.vision.images import DecodedImage

AnyPrompt = str | Sequence[int]
"""A prompt's text, or its tokens with one token per image."""
ADAPTERS = ("first", "second")
DECODER = r".*language_model.*\.(q_proj|v_proj|o_proj|up_proj|down_proj)"
TOWER = r".*(vision_tower|visual)\..*(q_proj|out_proj|fc1|qkv|attn\.proj|gate_proj|mlp\.[02])"
CONNECTOR = r".*(multi_modal_projector\.linear_\d|merger.*\.(mlp\.[02]|linear_fc\d))"
VISION_ADAPTERS = {"both": f"{DECODER}|{TOWER}|{CONNECTOR}", "tower": TOWER, "connector": CONNECTOR}
"""Patterns of the modules that each adapter of the vision tower or the connector changes."""

VIDEO_FAMILIES = ("llava_onevision", "qwen2_vl", "qwen2_5_vl", "qwen3_vl")
"""Families that take the frames of a clip as a video."""


def gap_of(logits: torch.Tensor, answer: Sequence[int]) -> float:
    """Return the largest gap between the best logit and that of an answer's token.

    logits: [len(answer), V].
    """
    return max(float(row.max() - row[t]) for row, t in zip(logits, answer, strict=True))


def video_patches(video: torch.Tensor, side: int, merge: int, times: int) -> torch.Tensor:
    """Return the patches of a video as Qwen2-VL orders them, [patches, colors · times · side²].

    video: [frames, colors, height, width]; the last frame is repeated up to a multiple of `times`.
    """
    video = torch.cat([video, video[-1:].expand(-len(video) % times, -1, -1, -1)])
    block = side * merge
    corners = [
        (time, top + dy, left + dx)
        for time in range(0, len(video), times)
        for top in range(0, video.shape[2], block)
        for left in range(0, video.shape[3], block)
        for dy in range(0, block, side)
        for dx in range(0, block, side)
    ]
    return torch.stack(
        [
            video[t : t + times, :, y : y + side, x : x + side].transpose(0, 1).flatten()
            for t, y, x in corners
        ]
    )


def published_positions(base: Any, types: list[int], pixels: dict[str, Any]) -> torch.Tensor:
    """Return the positions that Qwen's own code gives the tokens of a prompt with clips,
    [3, 1, tokens]. Those of transformers differ since version 5.3 (see `next_position`).

    types: 0 for text, 1 for a token of an image and 2 for one of a clip.
    """
    grids = {1: pixels.get("image_grid_thw"), 2: pixels.get("video_grid_thw")}
    rest = {kind: iter(() if grid is None else grid) for kind, grid in grids.items()}
    vision, intervals = base.config.vision_config, repeat(1.0)
    if base.config.model_type == "qwen2_5_vl":
        seconds = pixels.get("second_per_grid_ts", ())
        intervals = (vision.tokens_per_second * pair for pair in seconds)
    parts = [torch.full((3, 1), -1)]
    for kind, run in groupby(types):
        start = int(parts[-1].max()) + 1
        if kind == 0:
            parts.append(torch.arange(start, start + len(list(run))).expand(3, -1))
            continue
        spacing = next(intervals) if kind == 2 else 1.0
        sides = 1, vision.spatial_merge_size
        parts.append(base.model.get_vision_position_ids(start, next(rest[kind]), *sides, spacing))
    return torch.cat(parts[1:], dim=1)[:, None]


class _UncheckedQwen3VLProcessor(Qwen3VLProcessor):  # type: ignore[misc]
    """The stock processor without a check that needs torchvision."""

    def check_argument_for_proper_class(self, *arguments: Any) -> None:
        """Accept every argument."""


class OracleFamily(ABC):
    """A checkpoint of one family with adapters, and an oracle of its answers."""

    checkpoint: Path
    adapters: Path
    tokenizer: Any
    encoder: VisionEncoder
    service: EncoderService

    @abstractmethod
    def prompt_ids(self, prompt: AnyPrompt, images: Sequence[DecodedImage]) -> list[int]:
        """Return the tokens of a prompt, with those of its images."""

    @abstractmethod
    def logits(
        self,
        prompt: AnyPrompt,
        images: Sequence[DecodedImage],
        adapter: str | None,
        answer: list[int],
    ) -> torch.Tensor:
        """Return the oracle's logits after the prompt and each token, [len(answer) + 1, V]."""

    @abstractmethod
    def add_vision_adapters(self) -> None:
        """Write VISION_ADAPTERS, which the oracle knows as well."""

    @abstractmethod
    def add_kinds(self, invocation: list[int]) -> None:
        """Write `rslora`, an rsLoRA of the decoder, the tower and the connector, and `activated`,
        which acts from these tokens on. The oracle knows them as well."""

    def gap(
        self, prompt: str, images: Sequence[DecodedImage], adapter: str | None, answer: list[int]
    ) -> float:
        """Return the largest gap between the oracle's best logit and that of the answer."""
        return gap_of(self.logits(prompt, images, adapter, answer)[:-1], answer)

    def greedy(
        self, prompt: str, images: Sequence[DecodedImage], adapter: str | None, count: int
    ) -> list[int]:
        """Return the first tokens of the oracle's greedy answer."""
        answer: list[int] = []
        for _ in range(count):
            answer.append(int(self.logits(prompt, images, adapter, answer)[-1].argmax()))
        return answer


class Family(OracleFamily):
    """A checkpoint of one family, two adapters, its stock model and its vision encoder."""

    def __init__(self, checkpoint: Path, adapters: Path) -> None:
        self.checkpoint = checkpoint
        self.adapters = adapters
        for seed, adapter in enumerate(ADAPTERS):
            torch.manual_seed(seed)
            self.make_adapter(self.adapters / adapter, DECODER)
        self.model: Any = PeftModel.from_pretrained(
            self._stock(), self.adapters / ADAPTERS[0], ADAPTERS[0]
        )
        self.model.load_adapter(self.adapters / ADAPTERS[1], ADAPTERS[1])
        self.model.eval()
        self.tokenizer: Any = AutoTokenizer.from_pretrained(self.checkpoint)
        self.processor: Any = AutoImageProcessor.from_pretrained(self.checkpoint, backend="pil")
        self.encoder = VisionEncoder(self.checkpoint, 1)
        self.service = EncoderService(self.encoder, FeatureCache(1 << 24))

    def make_adapter(self, folder: Path, targets: str, **options: Any) -> None:
        """Write an adapter of modules that match `targets`, with the weights of torch's seed.

        options: further settings of PEFT.
        """
        config = LoraConfig(r=4, target_modules=targets, init_lora_weights=False, **options)
        get_peft_model(self._stock(), config).save_pretrained(folder)

    def add_vision_adapters(self) -> None:
        for seed, (name, targets) in enumerate(VISION_ADAPTERS.items()):
            self._add_adapter(name, 100 + seed, targets)

    def add_kinds(self, invocation: list[int]) -> None:
        ranks = {"(q_proj|qkv)": 3, "up_proj": 2}
        alphas = {"o_proj": 5, r"(linear_1|mlp\.0|linear_fc1)": 3}
        patterns = {"rank_pattern": ranks, "alpha_pattern": alphas}
        targets = VISION_ADAPTERS["both"]
        self._add_adapter("rslora", 200, targets, use_rslora=True, **patterns)
        activated = {"alora_invocation_tokens": invocation, "task_type": "CAUSAL_LM"}
        self._add_adapter("activated", 201, DECODER, **activated)

    def _add_adapter(self, name: str, seed: int, targets: str, **options: Any) -> None:
        torch.manual_seed(seed)
        self.make_adapter(self.adapters / name, targets, **options)
        self.model.load_adapter(self.adapters / name, name)
        self.model.eval()

    def _stock(self) -> Any:
        return AutoModelForImageTextToText.from_pretrained(self.checkpoint, dtype=torch.float32)

    def _pixels(
        self, base: Any, images: Sequence[DecodedImage]
    ) -> tuple[dict[str, Any], Iterator[list[int]]]:
        """Return the stock model's inputs for images, and the tokens that each one has."""
        family = base.config.model_type
        frames = [image for image in images if family in VIDEO_FAMILIES and image.is_video]
        stills = [Image.fromarray(image.rgb) for image in images if image not in frames]
        pixels: dict[str, Any] = {}
        rows: list[list[int]] = []
        if stills:
            # In a nested list, these are the images of one prompt.
            pixels |= self.processor(
                images=[stills] if family == "llava_onevision" else stills, return_tensors="pt"
            )
            features = base.get_image_features(**pixels).pooler_output
            rows += [[base.config.image_token_id] * len(one) for one in features]
        if frames:
            rows += self.add_video(pixels, frames)
        return pixels, iter(rows)

    def add_video(
        self, pixels: dict[str, Any], frames: Sequence[DecodedImage], fps: float = 24
    ) -> list[list[int]]:
        """Add the stock model's inputs for a clip to `pixels`, and return its tokens, by
        placeholder. Without torchvision, transformers has no processor of videos.

        fps: frequency of the frames.
        """
        base = self.model.get_base_model()
        config, processor = base.config, self.processor
        joined = config.model_type != "llava_onevision"
        height = width = config.vision_config.image_size if not joined else 0
        if joined:
            height, width = self._frame_size(config.model_type, frames)
        pictures = [
            np.asarray(Image.fromarray(one.rgb).resize((width, height), Image.Resampling.BICUBIC))
            for one in frames
        ]
        mean, std = map(torch.tensor, (processor.image_mean, processor.image_std))
        values = (torch.from_numpy(np.stack(pictures)).float() / 255 - mean) / std
        video = values.permute(0, 3, 1, 2)[None]
        token = config.video_token_id
        before = [pixels["pixel_values_videos"]] if "pixel_values_videos" in pixels else []
        if not joined:
            pixels["pixel_values_videos"] = torch.cat([*before, video])
            count = len(base.get_video_features(video).pooler_output[0]) - 1
            rows = [[token] * (count // len(frames)) for _ in frames]
            rows[-1].append(token)
            return rows
        sizes = (processor.patch_size, processor.merge_size, processor.temporal_patch_size)
        patches = video_patches(video[0], *sizes)
        grid = [-(-len(frames) // sizes[2]), height // sizes[0], width // sizes[0]]
        pixels["pixel_values_videos"] = torch.cat([*before, patches])
        grids = pixels.get("video_grid_thw", torch.empty(0, 3, dtype=torch.long))
        pixels["video_grid_thw"] = torch.cat([grids, torch.tensor([grid])])
        if config.model_type == "qwen2_5_vl":
            pair = processor.temporal_patch_size / fps
            pixels["second_per_grid_ts"] = [*pixels.get("second_per_grid_ts", ()), pair]
        rows = [token] * (len(patches) // processor.merge_size**2)
        if config.model_type != "qwen3_vl":
            return [rows]
        return [rows[: len(rows) // grid[0]]] * grid[0]

    def processed(self, prompt: str, images: Sequence[DecodedImage]) -> list[int]:
        """Return the tokens that Qwen3-VL's stock processor makes of a prompt with images and a
        clip, with the image token for the video token.

        Without torchvision it can neither resize nor normalize frames, which its tokens do not
        need.
        """
        pictures = Qwen2VLImageProcessorPil.from_pretrained(self.checkpoint)
        stored = Qwen3VLVideoProcessor.from_pretrained(self.checkpoint).to_dict()
        off = ("do_resize", "do_normalize", "do_convert_rgb", "do_sample_frames")
        clips = Qwen3VLVideoProcessor(**stored | dict.fromkeys(off, False))
        processor = _UncheckedQwen3VLProcessor(pictures, self.tokenizer, clips)
        config = self.model.get_base_model().config
        # The tokenizer names the image token of another family.
        processor.image_token, processor.image_token_id = "<|image_pad|>", config.image_token_id
        frames = np.stack([image.rgb for image in images if image.is_video])
        made = processor(
            text=prompt,
            images=[Image.fromarray(image.rgb) for image in images if not image.is_video] or None,
            videos=[torch.from_numpy(frames).permute(0, 3, 1, 2)],
        )
        swapped = {config.video_token_id: config.image_token_id}
        return [swapped.get(token, token) for token in made["input_ids"][0]]

    def _frame_size(self, family: str, frames: Sequence[DecodedImage]) -> tuple[int, int]:
        """Return the height and width that the stock processor gives the frames of a clip."""
        height, width = frames[0].height, frames[0].width
        factor = self.processor.patch_size * self.processor.merge_size
        if family != "qwen3_vl":
            limits = self.processor.size
            edges = limits["shortest_edge"], limits["longest_edge"]
            return smart_resize(height, width, factor, *edges)  # type: ignore[no-any-return]
        limits = Qwen3VLVideoProcessor.from_pretrained(self.checkpoint).size
        return qwen3_resize(  # type: ignore[no-any-return]
            max(2, len(frames)),
            height,
            width,
            factor=factor,
            min_pixels=limits["shortest_edge"],
            max_pixels=limits["longest_edge"],
        )

    def prompt_ids(self, prompt: AnyPrompt, images: Sequence[DecodedImage]) -> list[int]:
        return self._inputs(prompt, images)[0]

    @torch.inference_mode()
    def _inputs(
        self, prompt: AnyPrompt, images: Sequence[DecodedImage]
    ) -> tuple[list[int], dict[str, Any]]:
        """Return the tokens of a prompt with those of its images, and the model's other inputs."""
        base = self.model.get_base_model()
        pixels, rows = self._pixels(base, images) if images else ({}, iter(()))
        if isinstance(prompt, str):
            has_bos = prompt.startswith(self.tokenizer.bos_token)
            prompt = self.tokenizer(prompt, add_special_tokens=not has_bos)["input_ids"]
        ids: list[int] = []
        for token in prompt:
            ids += next(rows) if token == base.config.image_token_id else [token]
        return ids, pixels

    def logits(
        self,
        prompt: AnyPrompt,
        images: Sequence[DecodedImage],
        adapter: str | None,
        answer: list[int],
    ) -> torch.Tensor:
        return self.logits_of(*self._inputs(prompt, images), adapter, answer)

    @torch.inference_mode()
    def logits_of(
        self, ids: list[int], pixels: dict[str, Any], adapter: str | None, answer: list[int]
    ) -> torch.Tensor:
        """Return `logits` for a prompt's tokens and the model's other inputs."""
        base = self.model.get_base_model()
        tokens = torch.tensor([ids + answer])
        arguments = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), **pixels}
        if pixels.keys() & {"image_grid_thw", "video_grid_thw"}:
            is_video = tokens == base.config.video_token_id
            is_image = tokens == base.config.image_token_id
            types = is_image.int() + 2 * is_video.int()
            arguments["mm_token_type_ids"] = types
            if "video_grid_thw" in pixels and base.config.model_type != "qwen3_vl":
                arguments["position_ids"] = published_positions(base, types[0].tolist(), pixels)
        configs = self.model.peft_config
        if adapter and getattr(configs[adapter], "alora_invocation_tokens", None):
            # PEFT searches all the tokens it gets, so it must not get those of the answer.
            (offset,) = calculate_alora_offsets(configs, adapter, torch.tensor([ids]))
            arguments["alora_offsets"] = [None if offset is None else offset + len(answer)]
        if adapter is None:
            with self.model.disable_adapter():
                logits: torch.Tensor = self.model(**arguments).logits
        else:
            self.model.set_adapter(adapter)
            logits = self.model(**arguments).logits
        return logits[0, len(ids) - 1 :]


class FirstQwenVL(OracleFamily):
    """A checkpoint of the first Qwen-VL and two adapters. transformers has no such model, so the
    oracle is the slow reference of `tests/support/qwen_vl.py`."""

    def __init__(self, folder: Path) -> None:
        self.checkpoint = make_qwen_vl(folder / "model")
        self.adapters = folder / "adapters"
        self._invocations: dict[str, list[int]] = {}
        targets = ("attn.c_attn", "mlp.w1"), ("attn.c_attn", "attn.c_proj", "mlp.w2")
        for seed, (name, modules) in enumerate(zip(ADAPTERS, targets, strict=True)):
            make_adapter(self.adapters / name, seed, modules)
        self.tokenizer = load_tokenizer(self.checkpoint)
        self.encoder = VisionEncoder(self.checkpoint, 1)
        self.service = EncoderService(self.encoder, FeatureCache(1 << 24))

    def add_vision_adapters(self) -> None:
        tower, connector = qwen_vl.TOWER, qwen_vl.CONNECTOR
        targets = {"both": [*qwen_vl.TARGETS, *tower, *connector]}
        targets |= {"tower": [*tower], "connector": [*connector]}
        for seed, name in enumerate(VISION_ADAPTERS):
            make_adapter(self.adapters / name, 100 + seed, targets[name])

    def add_kinds(self, invocation: list[int]) -> None:
        everything = [*qwen_vl.TARGETS, *qwen_vl.TOWER, *qwen_vl.CONNECTOR]
        make_adapter(self.adapters / "rslora", 200, everything, use_rslora=True)
        self._invocations["activated"] = invocation
        options = {"alora_invocation_tokens": invocation}
        make_adapter(self.adapters / "activated", 201, qwen_vl.TARGETS, **options)

    @cached_property
    def reference(self) -> Reference:
        """The oracle, with all adapters that were written before its first use."""
        return Reference(self.checkpoint, {own.name: own for own in self.adapters.iterdir()})

    def prompt_ids(self, prompt: AnyPrompt, images: Sequence[DecodedImage]) -> list[int]:
        ids: list[int] = []
        for token in self.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt:
            ids += [token] * (QUERIES if token == IMAGE_PAD else 1)
        return ids

    def logits(
        self,
        prompt: AnyPrompt,
        images: Sequence[DecodedImage],
        adapter: str | None,
        answer: list[int],
    ) -> torch.Tensor:
        ids = self.prompt_ids(prompt, images)
        start = 0
        if invocation := self._invocations.get(str(adapter)):
            length = len(invocation)
            start = max(i for i in range(len(ids)) if ids[i : i + length] == invocation)
        features = [self.reference.features(image.rgb, adapter) for image in images]
        logits = self.reference.logits([*ids, *answer], features, adapter, start)
        return logits[len(ids) - 1 :]


FAMILY_NAMES = (*sorted(FAMILIES), "qwen_vl")


def make_family(
    name: str, tokenizer_of: Path, folder: Path, *, official: bool = False
) -> OracleFamily:
    """Return a family by its name in FAMILY_NAMES.

    official: whether its checkpoint has the official files in place of those of `tokenizer_of`.
    """
    if name == "qwen_vl":
        return FirstQwenVL(folder)
    checkpoint = make_checkpoint(name, tokenizer_of, folder / "model")
    if official:
        use_official_files(checkpoint, name)
    return Family(checkpoint, folder / "adapters")
