"""Parity of every vision family with transformers and PEFT, on random weights.

The tests use images of several sizes, several images in a prompt, adapters, merged, mixed and
unmerged steps, preemption, and reuse of prefixes.
"""

from __future__ import annotations

import json
import shutil
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks import baseline_policies
from tests.support.engine_client import request, run_questions
from tests.support.families import (
    ADAPTERS,
    FAMILY_NAMES,
    VIDEO_FAMILIES,
    Family,
    OracleFamily,
)
from tests.support.many_adapters import update
from tests.support.modes import drive
from tests.support.oracle import NEAR_TIE
from vlora.config import POLICIES, Options
from vlora.engine.engine import Engine
from vlora.errors import InvalidArgument
from vlora.ids import BASE, NO_IMAGE
from vlora.model.chunk import Prompt
from vlora.model.decoder_config import load_config
from vlora.model.inputs import PromptReader, image_grids, prompt_positions
from vlora.request import ImageFeatures, Request
from vlora.sampling import SamplingParams
from vlora.vision.chat_template import ChatTemplate
from vlora.vision.images import DecodedImage, PictureSize
from vlora.vision.prompts import render

baseline_policies.register()

MAX_TOKENS = 24
Answers = dict[str, list[int]]
CLIPS = (2, 8)
"""Questions about a clip. The second clip begins with the first two frames of the first."""


def questions(family: OracleFamily) -> list[tuple[str, list[DecodedImage], str | None]]:
    """Return prompts with their images, of sizes that make different numbers of tokens.

    The first and the last prompt with three pictures have a clip, the others independent images.
    """
    rng = np.random.default_rng(7)
    template = ChatTemplate.from_checkpoint(family.checkpoint)
    drawn: list[tuple[str, list[DecodedImage], str | None]] = []
    for number in range(9):
        count = 1 + number % 3
        is_clip = number in CLIPS
        sizes = rng.integers(9, 90, (1 if is_clip else count, 2)).repeat(3 if is_clip else 1, 0)
        images = [
            DecodedImage(rng.integers(0, 256, (*size, 3), np.uint8), is_clip) for size in sizes
        ]
        if number >= 6:  # the same beginning as an earlier question
            shared = 1 + is_clip
            images[:shared] = drawn[number - 6][1][:shared]
        marks = "<image>" * 3 if is_clip else "<image> then " * count
        stills, frames = (0, count) if is_clip else (count, 0)
        prompt = render("vqa", f"{marks}what is shown in {number}?", stills, frames, template)
        drawn.append((prompt, images, (None, *ADAPTERS)[number % 3 if number != 7 else 0]))
    return drawn


def longest_prompt(family: OracleFamily, prompts: list[str], features: list[ImageFeatures]) -> int:
    """Return the largest number of tokens of these prompts with their images."""
    reader = PromptReader(family.checkpoint, load_config(family.checkpoint))
    pairs = zip(prompts, features, strict=True)
    return max(len(reader.read(prompt, own).ids) for prompt, own in pairs)


@pytest.mark.parametrize("stills", [1, 2])
@pytest.mark.parametrize("family", FAMILY_NAMES, indirect=True)
def test_images_are_the_same_if_their_pictures_come_one_after_another(
    family: OracleFamily, stills: int
) -> None:
    """Their sizes are known before, but not that the orientation turns the last still."""
    rng = np.random.default_rng(stills)
    sizes = [*rng.integers(9, 90, (stills, 2)), (40, 60), (50, 20), (40, 60)]
    images = [
        DecodedImage(rng.integers(0, 256, (*size, 3), np.uint8), i >= stills)
        for i, size in enumerate(sizes)
    ]
    (whole,) = family.service.run([images])
    received = family.service.receive(None)
    measured = [PictureSize(image.height, image.width, image.is_video) for image in images]
    measured[stills - 1] = PictureSize(images[stills - 1].width, images[stills - 1].height, False)
    received.plan(measured)
    complete = [received.add(image.rgb) for image in images]
    assert complete.count(True) == len(received.images)
    parts = [feature for one in received.images for feature in family.service.encode([one])]
    answer = family.service.assemble(received.images, parts)
    np.testing.assert_allclose(answer.features, whole.features, atol=1e-5)
    assert answer.layout.tolist() == whole.layout.tolist()
    assert answer.size.tolist() == whole.size.tolist()
    assert answer.digests == whole.digests
    assert sum(one.prepared.tokens for one in received.images) <= len(whole.features)


@pytest.mark.parametrize("mode", ["unmerged", "mixed", "preempted"])
@pytest.mark.parametrize("family", FAMILY_NAMES, indirect=True)
def test_answers_equal_those_of_the_oracle(family: OracleFamily, mode: str) -> None:
    asked = questions(family)
    features = [
        ImageFeatures(encoded.features, encoded.layout)
        for encoded in family.service.run([images for _, images, _ in asked])
    ]
    longest = longest_prompt(family, [prompt for prompt, *_ in asked], features)
    engine = Engine(
        Options(
            model=family.checkpoint,
            adapters=family.adapters,
            max_num_seqs=6,
            block_size=4,
            kv_cache_tokens=longest + 4 * MAX_TOKENS if mode == "preempted" else 4096,
        )
    )
    if mode != "unmerged":
        slots = (BASE, *range(len(ADAPTERS)))
        drive(engine, lambda i: s if (s := slots[i % 3]) in engine.adapters.resident else BASE)
    answers, cached = run_questions(engine, asked, features, MAX_TOKENS)
    if mode == "preempted":
        assert engine.stats().preemptions > 0
    else:
        last = features[8].layout
        pair = min(last[0, 1] // last[0, 2], len(features[8].features) // 2)
        assert cached["6"] > 0
        assert cached["8"] >= pair
    for number, (prompt, images, adapter) in enumerate(asked):
        answer = answers[str(number)]
        assert len(answer) == MAX_TOKENS
        assert family.gap(prompt, images, adapter, answer) <= NEAR_TIE, number


@pytest.fixture(scope="module")
def served(family: OracleFamily, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the family's adapters and an activated one, which the oracle knows."""
    folder, own = tmp_path_factory.mktemp("served"), family.adapters
    family.adapters = folder
    invocation = family.tokenizer(questions(family)[0][0], add_special_tokens=False)["input_ids"]
    family.add_kinds(invocation[-2:])
    family.adapters = own
    shutil.rmtree(folder / "rslora")
    shutil.copytree(own, folder, dirs_exist_ok=True)
    return folder


def run_with_a_change(engine: Engine, asked: list[Request], change: Callable[[], None]) -> Answers:
    """Return the tokens of greedy answers by request id. The last three requests arrive after a
    change, which is made once the first request has a token."""
    answers: Answers = defaultdict(list)

    def add(requests: list[Request]) -> None:
        for item in requests:
            engine.add(engine.prepare(item), time.monotonic())

    def step() -> None:
        for output in engine.step():
            assert output.error is None
            answers[output.request_id] += output.token_ids
        if engine.stalled:
            engine.adapters.finish()

    add(asked[:-3])
    while not answers["0"]:
        step()
    change()
    add(asked[-3:])
    while not engine.idle:
        step()
    return answers


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("family", ["llava", "llava_onevision", "qwen2_vl"], indirect=True)
def test_answers_under_every_policy_equal_those_of_the_oracle(
    family: OracleFamily, served: Path, policy: str, tmp_path: Path
) -> None:
    """Preempt requests, and replace the second adapter by the first once a request uses it."""
    first, second = ADAPTERS
    used = (second, first, first, "activated", first, None, second, first, first)
    asked = [(*question[:2], name) for question, name in zip(questions(family), used, strict=True)]
    features = [
        ImageFeatures(encoded.features, encoded.layout)
        for encoded in family.service.run([images for _, images, _ in asked])
    ]
    longest = longest_prompt(family, [prompt for prompt, *_ in asked], features)
    root = shutil.copytree(served, tmp_path / "adapters")
    engine = Engine(
        Options(
            model=family.checkpoint,
            adapters=root,
            policy=policy,
            max_num_seqs=6,
            max_batch_requests=4,
            max_num_batched_tokens=64,
            block_size=4,
            kv_cache_tokens=longest + 2 * MAX_TOKENS,
        )
    )

    # With costs of large adapters, `predictive` merges too.
    engine.costs.use(replace(engine.costs.profile, lora_calls=1e-2, merge=(1e-3, 0.0)))
    requests = [
        request(str(number), MAX_TOKENS, prompt=prompt, adapter=adapter, images=own)
        for number, ((prompt, _, adapter), own) in enumerate(zip(asked, features, strict=True))
    ]

    def replace_second() -> None:
        shutil.rmtree(root / second)
        shutil.copytree(served / first, root / second)
        update(engine, root)

    answers = run_with_a_change(engine, requests, replace_second)
    stats = engine.stats()
    assert stats.preemptions > 0
    assert (stats.merges > 0) == (policy != "unmerge_only")
    for number, (prompt, images, adapter) in enumerate(asked):
        answer = answers[str(number)]
        assert len(answer) == MAX_TOKENS
        known = first if number == 6 else adapter
        assert family.gap(prompt, images, known, answer) <= NEAR_TIE, number


@pytest.mark.parametrize("family", ["qwen2_vl"], indirect=True)
def test_a_layout_whose_patches_do_not_make_its_rows_is_refused(family: Family) -> None:
    engine = Engine(Options(model=family.checkpoint))
    (encoded,) = family.service.run([questions(family)[0][1]])
    layout = encoded.layout.copy()
    layout[0, 3] += 2
    prompt = questions(family)[0][0]
    request = Request("r", prompt, SamplingParams(), images=ImageFeatures(encoded.features, layout))
    with pytest.raises(InvalidArgument, match="patches must make one row"):
        engine.prepare(request)


@pytest.mark.parametrize("family", ["qwen3_vl"], indirect=True)
def test_features_and_layers_that_do_not_fit_the_levels_are_refused(
    family: Family, tmp_path: Path
) -> None:
    engine = Engine(Options(model=family.checkpoint))
    prompt, images, _ = questions(family)[0]
    (encoded,) = family.service.run([images])
    width = encoded.features.shape[1]
    narrow = ImageFeatures(encoded.features[:, : width // 3].copy(), encoded.layout)
    with pytest.raises(InvalidArgument, match=rf"must be \[rows, {width}\]"):
        engine.prepare(Request("r", prompt, SamplingParams(), images=narrow))
    config = json.loads((family.checkpoint / "config.json").read_text())
    config["text_config"] |= {"num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidArgument, match="2 levels of image features need more than 2 layers"):
        load_config(tmp_path)


@pytest.mark.parametrize("family", VIDEO_FAMILIES, indirect=True)
@pytest.mark.parametrize(("stills", "frames"), [(0, 1), (0, 7), (1, 2), (2, 4)])
def test_a_clip_is_what_the_stock_model_makes_of_a_video(
    family: Family, stills: int, frames: int
) -> None:
    rng = np.random.default_rng(stills + 10 * frames)
    sizes = [*rng.integers(9, 90, (stills, 2)), *[rng.integers(9, 90, 2)] * frames]
    images = [
        DecodedImage(rng.integers(0, 256, (*size, 3), np.uint8), i >= stills)
        for i, size in enumerate(sizes)
    ]
    template = ChatTemplate.from_checkpoint(family.checkpoint)
    prompt = render("vqa", "what happens?", stills, frames, template)
    (encoded,) = family.service.run([images])
    assert int(encoded.layout[:, 5].sum()) == frames
    engine = Engine(Options(model=family.checkpoint, adapters=family.adapters))
    features = ImageFeatures(encoded.features, encoded.layout)
    asked = [(prompt, images, adapter) for adapter in (None, ADAPTERS[0])]
    answers, _ = run_questions(engine, asked, [features] * 2, MAX_TOKENS)
    for number, (*question, adapter) in enumerate(asked):
        assert family.gap(*question, adapter, answers[str(number)]) <= NEAR_TIE


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"], indirect=True)
@pytest.mark.parametrize(("stills", "frames"), [(0, 33), (0, 64), (1, 33)])
@pytest.mark.parametrize("ends_with_clip", [False, True])
def test_positions_after_a_clip_longer_in_time_than_in_its_sides_are_those_of_qwen(
    family: Family, stills: int, frames: int, ends_with_clip: bool
) -> None:
    rng = np.random.default_rng(frames)
    images = [
        DecodedImage(rng.integers(0, 256, (12, 18, 3), np.uint8), i >= stills)
        for i in range(stills + frames)
    ]
    template = ChatTemplate.from_checkpoint(family.checkpoint)
    prompt = render("vqa", "what follows?", stills, frames, template)
    if ends_with_clip:
        before, token, _ = prompt.rpartition("<|image_pad|>")
        prompt = before + token
    (encoded,) = family.service.run([images])
    features = ImageFeatures(encoded.features, encoded.layout)
    engine = Engine(Options(model=family.checkpoint, adapters=family.adapters))
    asked = (prompt, images, ADAPTERS[0])
    answers, _ = run_questions(engine, [asked], [features], MAX_TOKENS)
    assert family.gap(*asked, answers["0"]) <= NEAR_TIE


def test_positions_are_those_of_a_published_example() -> None:
    """Compare with positions of Qwen2.5-VL that transformers 5.2 computed (its issue 45381)."""
    rows = 84 * 12 * 16
    layout = np.array([[0, rows, 84, 24, 32, 168]], np.int32)
    images = ImageFeatures(np.zeros((rows, 1), np.float32), layout)
    feature_row = [NO_IMAGE] * 15 + [*range(rows)] + [NO_IMAGE] * 10
    positions = prompt_positions(feature_row, images, image_grids(images, 2), [4.0])
    assert positions[:, :16].tolist() == [[*range(15), 15]] * 3
    assert positions[:, 15 + rows - 1].tolist() == [347, 26, 30]
    assert positions[:, -10:].tolist() == [[*range(348, 358)]] * 3
    prompt = Prompt((7,) * len(feature_row), torch.tensor(feature_row), None, positions)
    assert len(feature_row) + prompt.position_shift == 358


@pytest.mark.parametrize("family", ["qwen3_vl"], indirect=True)
@pytest.mark.parametrize(("stills", "frames"), [(0, 2), (1, 5), (2, 6)])
def test_the_prompt_of_a_clip_is_that_of_the_stock_processor(
    family: Family, stills: int, frames: int
) -> None:
    rng = np.random.default_rng(frames)
    images = [
        DecodedImage(rng.integers(0, 256, (24, 40, 3), np.uint8), i >= stills)
        for i in range(stills + frames)
    ]
    template = ChatTemplate.from_checkpoint(family.checkpoint)
    prompt = render("vqa", "when?", stills, frames, template)
    (encoded,) = family.service.run([images])
    reader = PromptReader(family.checkpoint, load_config(family.checkpoint))
    read = reader.read(prompt, ImageFeatures(encoded.features, encoded.layout))
    before, _, after = render("vqa", "when?", stills + 1, 0, template).rpartition("<|image_pad|>")
    assert list(read.ids) == family.processed(f"{before}<|video_pad|>{after}", images)


@pytest.mark.parametrize("family", ["llava_onevision"], indirect=True)
def test_an_image_is_encoded_differently_beside_others(family: Family) -> None:
    rng = np.random.default_rng(1)
    image, other, third = (
        DecodedImage(rng.integers(0, 256, (30, 70, 3), np.uint8)) for _ in range(3)
    )
    before = family.service.counters.misses
    alone, pair, trio = family.service.run([[image], [image, other], [image, other, third]])
    assert family.service.counters.misses - before == 4
    assert alone.layout[0, 1] > pair.layout[0, 1]
    assert pair.digests == trio.digests[:2]
    assert alone.digests[0] != pair.digests[0]


@pytest.mark.parametrize("family", ["llava_onevision"], indirect=True)
def test_a_large_image_is_scaled_down_to_the_models_limit(family: Family) -> None:
    """Tiles with 96 tokens exceed the limit of 64."""
    image = DecodedImage(np.random.default_rng(2).integers(0, 256, (15, 90, 3), np.uint8))
    (ours,) = family.encoder.encode([image])
    pixels = family.processor(images=[Image.fromarray(image.rgb)], return_tensors="pt")
    with torch.inference_mode(), family.model.disable_adapter():
        (theirs,) = family.model.get_base_model().get_image_features(**pixels).pooler_output
    assert 16 < len(ours) < 16 + 64
    np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-5, atol=1e-5)


def test_equal_frames_are_encoded_once(family: Family) -> None:
    rng = np.random.default_rng(9)
    a, b = (DecodedImage(rng.integers(0, 256, (24, 40, 3), np.uint8), True) for _ in range(2))
    clips = [a] * 6 + [b] * 4, [b] * 6 + [a] * 4
    before = family.service.counters.misses
    found = [family.service.run([clip])[0].features for clip in clips]
    # The last frame of a clip of LLaVA-OneVision has one more row, which ends the clip.
    ends = 2 if family.model.get_base_model().config.model_type == "llava_onevision" else 0
    assert family.service.counters.misses - before == 2 + ends
    for clip, features in zip(clips, found, strict=True):
        whole = family.encoder.encode([one.image for one in family.encoder.prepare(clip)])
        np.testing.assert_allclose(features, np.concatenate(whole), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["qwen2_vl"], indirect=True)
def test_pairs_of_frames_are_cached_and_have_the_size_of_the_first(family: Family) -> None:
    rng = np.random.default_rng(4)
    frames = [
        DecodedImage(rng.integers(0, 256, (*size, 3), np.uint8), is_video=True)
        for size in ((24, 40), (60, 20), (24, 40), (24, 40), (24, 40))
    ]
    before = family.service.counters
    whole, longer = family.service.run([frames[:4], frames])
    after = family.service.counters
    assert after.misses - before.misses == 3
    assert after.hits - before.hits == 2
    rows = len(whole.features) // 2
    assert whole.layout[:, :3].tolist() == [[0, 2 * rows, 2]]
    assert whole.layout[0, 5] == 4
    assert longer.layout[:, :3].tolist() == [[0, 3 * rows, 3]]
    assert longer.layout[0, 5] == 5
    assert whole.size.tolist() == longer.size.tolist() == [[24, 40]]
    (last,) = family.service.run([[DecodedImage(frames[4].rgb)]])
    assert np.array_equal(last.features, longer.features[2 * rows :])


@pytest.mark.parametrize("family", ["qwen3_vl"], indirect=True)
def test_features_that_differ_in_a_level_or_the_grid_share_no_block(family: Family) -> None:
    (prompt, images, _), *_ = questions(family)
    (encoded,) = family.service.run([images])
    width = encoded.features.shape[1]
    other_level = encoded.features.copy()
    other_level[:, -width // 4 :] += 1.0
    other_grid = encoded.layout.copy()
    other_grid[0, 3:5] = other_grid[0, 4:2:-1]
    assert (other_grid != encoded.layout).any()
    features = [
        ImageFeatures(encoded.features, encoded.layout),
        ImageFeatures(encoded.features, encoded.layout),
        ImageFeatures(other_level, encoded.layout),
        ImageFeatures(encoded.features, other_grid),
    ]
    engine = Engine(Options(model=family.checkpoint, block_size=4, kv_cache_tokens=4096))
    cached = [run_questions(engine, [(prompt, images, None)], [one], 2)[1]["0"] for one in features]
    before_image = PromptReader(family.checkpoint, load_config(family.checkpoint)).read(
        prompt, features[0]
    )
    first_row = before_image.feature_row.tolist().index(0)
    assert cached[1] > first_row
    assert cached[2] <= first_row
    # The first tokens of both grids have equal positions.
    assert first_row < cached[3] < cached[1]
