"""Prompts, positions and answers for video files are those of transformers for the same files."""

from __future__ import annotations

import itertools
from base64 import b64encode
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("av", reason="the extra video is not installed")

from transformers import Qwen3VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize
from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as qwen3_resize
from transformers.video_utils import VideoMetadata

from tests.support import video_files as files
from tests.support.decoding import start
from tests.support.engine_client import run_questions
from tests.support.families import (
    ADAPTERS,
    VIDEO_FAMILIES,
    Family,
    make_family,
    published_positions,
)
from tests.support.oracle import NEAR_TIE
from tests.support.triton_client import png
from vlora.config import Limits, Options
from vlora.engine.engine import Engine
from vlora.errors import InvalidArgument
from vlora.model.chunk import Prompt
from vlora.model.decoder_config import load_config
from vlora.model.inputs import PromptReader
from vlora.request import ImageFeatures
from vlora.sampling import MediaOptions
from vlora.vision.chat_template import Chat, ChatTemplate
from vlora.vision.decoding import ImageDecoder
from vlora.vision.features import EncodedImages, RequestImages
from vlora.vision.images import DecodedImage, check_images
from vlora.vision.prompts import render
from vlora.vision.video import VideoSampling, plan_video, read_frames

LIMITS = Limits()
FILES = {
    "h264.mp4": lambda: files.video("h264", "mp4", frames=files.pictures(21, 70, 38)),
    "vp9.webm": lambda: files.video("vp9", "webm", frames=files.pictures(12, 40, 52, seed=1)),
    "h265.ts": lambda: files.video("h265", "ts", frames=files.pictures(17, 64, 64, seed=2)),
}
LISTED = {name: files.pictures(4, 40, 52, seed) for seed, name in enumerate(("list a", "list b"))}
PICTURE = np.random.default_rng(8).integers(0, 256, (30, 44, 3), np.uint8)
IMAGE, VIDEO = {"type": "image"}, {"type": "video"}
PRUNED_FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")


@pytest.fixture(scope="module", params=VIDEO_FAMILIES)
def family(
    request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Any:
    folder = tmp_path_factory.mktemp(request.param)
    return make_family(request.param, checkpoint, folder, official=True)


@pytest.fixture(scope="module")
def decoder() -> Iterator[ImageDecoder]:
    decoder = ImageDecoder(LIMITS)
    yield decoder
    decoder.close()


class Request:
    """A conversation with pictures and files, as this project and the stock processor see it."""

    def __init__(
        self,
        family: Family,
        decoder: ImageDecoder,
        parts: Sequence[dict[str, str]],
        videos: Sequence[bytes],
        options: MediaOptions,
    ) -> None:
        self.family = family
        self.parts = parts
        images = [png(PICTURE) for part in parts if part is IMAGE]
        asked = check_images(images, (), None, LIMITS, videos, options)
        received = family.service.receive(None, options=options)
        _decode(decoder, asked, received)
        rows = family.service.encode(received.images)
        encoded = family.service.assemble(received.images, rows, received.videos)
        self.features = _features(encoded)
        self.sampling = VideoSampling(options.num_frames, options.fps)
        self.videos = videos

    def prompt(self) -> Any:
        template = ChatTemplate.from_checkpoint(self.family.checkpoint)
        chat = Chat([{"role": "user", "content": self.parts}])
        images, frames = self.features.counts
        return render("chat", chat, images, frames, template, self.features.videos)

    def stock(self) -> tuple[list[int], dict[str, Any]]:
        """Return the tokens of the stock prompt, and the stock model's other inputs."""
        family = self.family
        config = family.model.get_base_model().config
        kind, pixels, texts = config.model_type, dict[str, Any](), list[str]()
        image, video = family.tokenizer.convert_ids_to_tokens(
            [config.image_token_id, config.video_token_id]
        )
        counts: list[int] = []
        if any(part is IMAGE for part in self.parts):
            pixels, rows = family._pixels(family.model.get_base_model(), [DecodedImage(PICTURE)])
            counts = [len(one) for one in rows]
        for data in self.videos:
            frames, metadata = self._sampled(data)
            # The first two frames are a pair, as in every processor of Qwen's.
            tokens = family.add_video(pixels, frames, metadata.sampled_fps)
            texts.append(video * sum(map(len, tokens)))
            if kind == "qwen3_vl":
                texts[-1] = _timed(video, metadata, pixels["video_grid_thw"][-1:])
        turns = [{"role": "user", "content": self.parts}]
        prompt = _stock_template(family).apply(turns, True, False)
        pieces = prompt.split(video)
        text = pieces[0] + "".join(a + b for a, b in zip(texts, pieces[1:], strict=True))
        first, *others = text.split(image)
        text = first + "".join(image * n + piece for n, piece in zip(counts, others, strict=True))
        has_bos = text.startswith(family.tokenizer.bos_token or "no token")
        return family.tokenizer(text, add_special_tokens=not has_bos)["input_ids"], pixels

    def _sampled(self, data: bytes) -> tuple[list[DecodedImage], VideoMetadata]:
        sampled = self.family.service.sample
        for name, pictures in LISTED.items():
            if data == video_of(name):
                frames = [DecodedImage(rgb, True) for rgb in pictures]
                return frames, VideoMetadata(4, fps=24.0, frames_indices=[*range(4)])
        plan = plan_video(data, "video 0", 1 << 24)
        plan = plan.with_indices(sampled(self.sampling, plan.total, plan.fps))
        frames = [DecodedImage(rgb, True) for rgb in read_frames(data, "video 0", plan)]
        indices = list(plan.indices)
        return frames, VideoMetadata(plan.total, fps=plan.fps, frames_indices=indices)


def _decode(decoder: ImageDecoder, asked: Any, received: RequestImages) -> None:
    start(decoder, asked, received).result(60)  # type: ignore[arg-type]


def _features(encoded: EncodedImages) -> ImageFeatures:
    return ImageFeatures(encoded.features, encoded.layout, videos=encoded.videos)


def _timed(video: str, metadata: VideoMetadata, grid: torch.Tensor) -> str:
    """Return the text of Qwen3-VL's stock processor, which stands between the outer tokens."""
    settings = SimpleNamespace(merge_size=2, temporal_patch_size=2)
    processor = SimpleNamespace(
        video_processor=settings,
        vision_start_token="<|vision_start|>",
        vision_end_token="<|vision_end|>",
        video_token=video,
        _calculate_timestamps=lambda *a: Qwen3VLProcessor._calculate_timestamps(None, *a),
    )
    inputs = {"video_grid_thw": grid, "video_metadata": [metadata]}
    return Qwen3VLProcessor.replace_video_token(processor, inputs, 0)


def _stock_template(family: Family) -> ChatTemplate:
    return ChatTemplate.from_checkpoint(family.checkpoint)


def video_of(name: str) -> bytes:
    """Return a video of a request: a file, or a list of frames."""
    if name in FILES:
        return FILES[name]()
    return b"data:video/jpeg;base64," + b",".join(b64encode(png(rgb)) for rgb in LISTED[name])


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


ASKED: dict[str, tuple[list[dict[str, str]], list[str], MediaOptions]] = {
    **{
        f"{name}, {options}": ([VIDEO, text("What?")], [name], MediaOptions(**options))
        for name in FILES
        for options in ({}, {"num_frames": 6}, {"fps": 5.0})
    },
    "image first": ([IMAGE, text("in "), VIDEO], ["h264.mp4"], MediaOptions(num_frames=4)),
    "image last": ([VIDEO, text(" or "), IMAGE], ["h264.mp4"], MediaOptions(num_frames=4)),
    "two videos": (
        [VIDEO, text("or"), VIDEO, text("?")],
        ["h264.mp4", "vp9.webm"],
        MediaOptions(num_frames=6),
    ),
    "lists of frames": (
        [VIDEO, IMAGE, text("or"), VIDEO, VIDEO, text("?")],
        ["list a", "vp9.webm", "list b"],
        MediaOptions(num_frames=4),
    ),
}


def test_limits_of_pixels_apply_to_images_and_frames(family: Family, decoder: ImageDecoder) -> None:
    options = MediaOptions(num_frames=4, min_pixels=64, max_pixels=512)
    kind = family.model.get_base_model().config.model_type
    if kind == "llava_onevision":
        with pytest.raises(InvalidArgument, match="'llava_onevision' does not have; leave them"):
            Request(family, decoder, [IMAGE], [], options)
        return
    asked = Request(family, decoder, [IMAGE, VIDEO], [FILES["h264.mp4"]()], options)
    patch = family.processor.patch_size
    still, *clip = (asked.features.layout[:, 3:5] * patch).tolist()
    factor = patch * family.processor.merge_size
    assert tuple(still) == smart_resize(*PICTURE.shape[:2], factor, 64, 512)
    sizes = {"qwen3_vl": qwen3_resize(4, 38, 70, 2, factor, 64, 512)}
    assert {tuple(size) for size in clip} == {
        sizes.get(kind, smart_resize(38, 70, factor, 64, 512))
    }


@pytest.mark.parametrize("name", ASKED)
def test_prompt_positions_and_answer_are_those_of_transformers(
    family: Family, decoder: ImageDecoder, name: str
) -> None:
    parts, videos, options = ASKED[name]
    asked = Request(family, decoder, parts, [video_of(video) for video in videos], options)
    prompt = asked.prompt()
    ids, pixels = asked.stock()
    base = family.model.get_base_model()
    image, video = base.config.image_token_id, base.config.video_token_id
    config = load_config(family.checkpoint)
    read = PromptReader(family.checkpoint, config).read(prompt, asked.features)
    assert list(read.ids) == [image if token == video else token for token in ids]
    if config.rope_axes:
        types = [(token == image) + 2 * (token == video) for token in ids]
        if base.config.model_type == "qwen3_vl":
            grids = {key: pixels.get(key) for key in ("image_grid_thw", "video_grid_thw")}
            positions, _ = base.model.get_rope_index(
                torch.tensor([ids]), mm_token_type_ids=torch.tensor([types]), **grids
            )
        else:
            positions = published_positions(base, types, pixels)
        assert read.positions is not None
        assert read.positions.tolist() == positions[:, 0].tolist()
    engine = Engine(Options(model=family.checkpoint, adapters=family.adapters))
    adapter = ADAPTERS[0]
    answers, _ = run_questions(engine, [(prompt, (), adapter)], [asked.features], 8)
    logits = family.logits_of(ids, pixels, adapter, answers["0"])
    gaps = [float(row.max() - row[t]) for row, t in zip(logits[:-1], answers["0"], strict=True)]
    assert max(gaps) <= NEAR_TIE


@torch.inference_mode()
def pruned_logits(
    family: Family,
    ids: list[int],
    pixels: dict[str, Any],
    whole: Prompt,
    stays: list[bool],
    answer: list[int],
) -> torch.Tensor:
    """Return the stock model's logits if nothing attends to tokens that do not stay."""
    base = family.model.get_base_model()
    tokens = torch.tensor([ids + answer])
    assert whole.positions is not None
    own = torch.arange(len(ids), len(ids) + len(answer)) + whole.position_shift
    family.model.set_adapter(ADAPTERS[0])
    logits: torch.Tensor = family.model(
        input_ids=tokens,
        attention_mask=torch.tensor([stays + [True] * len(answer)]).long(),
        position_ids=torch.cat([whole.positions, own.expand(3, -1)], dim=1)[:, None],
        mm_token_type_ids=2 * (tokens == base.config.video_token_id).int(),
        **pixels,
    ).logits
    return logits[0, len(ids) - 1 :]


@pytest.mark.parametrize("family", PRUNED_FAMILIES, indirect=True)
def test_answers_about_a_pruned_video_are_those_of_the_stock_model_without_the_same_tokens(
    family: Family, decoder: ImageDecoder
) -> None:
    parts, options = [VIDEO, text("What?")], MediaOptions(num_frames=8)
    still = files.pictures(1, 70, 38) * 9 + files.pictures(12, 70, 38, seed=3)
    clip = files.video("h264", "mp4", frames=still)
    asked = Request(family, decoder, parts, [clip], options)
    prompt, (ids, pixels) = asked.prompt(), asked.stock()
    config = load_config(family.checkpoint)
    whole = PromptReader(family.checkpoint, config).read(prompt, asked.features)
    read = PromptReader(family.checkpoint, config, 0.5).read(prompt, asked.features)
    # Compute with a plain loop which rows stay.
    assert whole.features is not None
    rows, width = whole.features.double(), len(whole.features) // 4
    alike = {
        row: float(torch.cosine_similarity(rows[row], rows[row - width], dim=0))
        for row in range(width, len(rows))
    }
    count = len(rows) // 2 - width
    kept = {*range(width), *sorted(alike, key=alike.__getitem__)[:count]}
    stays = [row < 0 or row in kept for row in whole.feature_row.tolist()]
    assert read.ids == tuple(itertools.compress(whole.ids, stays))
    assert len(whole.ids) - len(read.ids) == len(rows) - len(rows) // 2 > 0
    assert read.position_shift + len(read.ids) == whole.position_shift + len(whole.ids)
    engine = Engine(
        Options(model=family.checkpoint, adapters=family.adapters, video_pruning_rate=0.5)
    )
    questions = [(prompt, (), ADAPTERS[0])]
    answers, _ = run_questions(engine, questions, [asked.features], 8)
    again, _ = run_questions(engine, questions, [asked.features], 8)
    assert again == answers
    logits = pruned_logits(family, ids, pixels, whole, stays, answers["0"])
    gaps = [float(row.max() - row[t]) for row, t in zip(logits[:-1], answers["0"], strict=True)]
    assert max(gaps) <= NEAR_TIE


def test_a_model_with_positions_of_one_axis_cannot_prune_videos(checkpoint: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"'video_pruning_rate' = .* needs a model of Qwen2"):
        PromptReader(checkpoint, load_config(checkpoint), 0.5)
