"""Tests of the vision encoder, of its feature cache, and of the sizes of clips."""

from __future__ import annotations

import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoImageProcessor, LlavaForConditionalGeneration
from transformers.models.auto import image_processing_auto as auto
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.qwen3_vl.video_processing_qwen3_vl import (
    Qwen3VLVideoProcessor,
    smart_resize,
)

from tests.support.polling import until
from vlora.errors import Internal, InvalidArgument, Unsupported
from vlora.metrics import EncoderCounters
from vlora.vision import features
from vlora.vision.encoder import PreparedImage, TextOnlyEncoder, VisionEncoder, open_encoder
from vlora.vision.families.qwen_vl import (
    clip_settings,
    frame_size_of_qwen2,
    frame_size_of_qwen3,
)
from vlora.vision.features import EncoderService, FeatureCache
from vlora.vision.images import DecodedImage, PictureSize


@pytest.fixture(scope="module")
def encoder(checkpoint: Path) -> VisionEncoder:
    return VisionEncoder(checkpoint, threads=1)


def random_images(seed: int, count: int) -> list[DecodedImage]:
    """Return images of random sizes, including odd and narrow ones."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 150, (count, 2))
    return [DecodedImage(rng.integers(0, 256, (h, w, 3), dtype=np.uint8)) for h, w in sizes]


def copy_of(checkpoint: Path, folder: Path) -> Path:
    """Copy a checkpoint into a folder with a single weights file, which the test then changes."""
    shutil.copytree(checkpoint, folder, ignore=shutil.ignore_patterns("model*"))
    weights: dict[str, torch.Tensor] = {}
    for shard in checkpoint.glob("model*.safetensors"):
        weights |= load_file(shard)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def change_weights(folder: Path, change) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file(change(weights), folder / "model.safetensors", {"format": "pt"})


def doubling(part: str):
    """Return a change that doubles the weights whose name contains `part`."""
    return lambda weights: {k: w * 2 if part in k else w for k, w in weights.items()}


def test_the_decoder_is_not_loaded(checkpoint, encoder):
    ours = sum(weight.numel() for weight in encoder._model.parameters())
    stock = LlavaForConditionalGeneration.from_pretrained(checkpoint)
    parts = (stock.model.vision_tower, stock.model.multi_modal_projector)
    assert ours == sum(weight.numel() for part in parts for weight in part.parameters())


def test_the_digest_depends_on_the_tower_the_connector_and_the_preprocessing(
    checkpoint, encoder, tmp_path
):
    folder = copy_of(checkpoint, tmp_path / "copy")
    assert VisionEncoder(folder, 1).tower_digest == encoder.tower_digest
    change_weights(folder, doubling("language_model"))
    assert VisionEncoder(folder, 1).tower_digest == encoder.tower_digest
    change_weights(folder, doubling("projector.linear_2"))
    changed = VisionEncoder(folder, 1).tower_digest
    for name in ("preprocessor_config.json", "processor_config.json"):
        text = (folder / name).read_text()
        assert "0.5" in text
        (folder / name).write_text(text.replace("0.5", "0.25"))
    assert len({encoder.tower_digest, changed, VisionEncoder(folder, 1).tower_digest}) == 3


def test_key_layouts_of_published_checkpoints_load(checkpoint, encoder, tmp_path):
    """Keys of transformers 4, `vision_tower.vision_model...`, give the same features."""
    folder = copy_of(checkpoint, tmp_path / "copy")

    def as_published(weights):
        return {
            name.replace("vision_tower.", "vision_tower.vision_model."): weight
            for name, weight in weights.items()
        }

    change_weights(folder, as_published)
    images = random_images(2, 2)
    published = VisionEncoder(folder, 1).encode(images)
    np.testing.assert_array_equal(published, encoder.encode(images))


def without_bias(weights):
    return {name: weight for name, weight in weights.items() if "linear_2.bias" not in name}


def with_short_bias(weights):
    return {name: w[:-1] if "linear_2.bias" in name else w for name, w in weights.items()}


def shorten(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-5])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: change_weights(folder, without_bias), r"lacks 1 weights .*linear_2\.bias"),
        (
            lambda folder: change_weights(folder, with_short_bias),
            r"linear_2\.bias' of shape \(191,\);.* requires \(192,\)",
        ),
        (
            lambda folder: (folder / "model.safetensors").rename(folder / "other.safetensors"),
            r"cannot be loaded: .*model\.safetensors",
        ),
        (shorten, r"model\.safetensors cannot be read"),
    ],
)
def test_weights_that_cannot_be_used_are_named(checkpoint, tmp_path, change, message):
    folder = copy_of(checkpoint, tmp_path / "copy")
    change(folder)
    with pytest.raises(InvalidArgument, match=message):
        VisionEncoder(folder, 1)


def test_a_folder_without_a_llava_tower_is_refused(checkpoint, tmp_path):
    with pytest.raises(InvalidArgument, match=r"config\.json is missing"):
        VisionEncoder(tmp_path, 1)
    folder = copy_of(checkpoint, tmp_path / "copy")
    for name in ("preprocessor_config.json", "processor_config.json"):
        (folder / name).rename(tmp_path / name)
    with pytest.raises(InvalidArgument, match="no readable image processor"):
        VisionEncoder(folder, 1)
    for name in ("preprocessor_config.json", "processor_config.json"):
        (tmp_path / name).rename(folder / name)
    config = json.loads((folder / "config.json").read_text())["text_config"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidArgument, match="type 'llama'"):
        VisionEncoder(folder, 1)


def test_an_installed_torchvision_changes_no_features(checkpoint, encoder, monkeypatch):
    """The default of transformers is torchvision's processor wherever it is installed."""

    class TorchvisionProcessor(CLIPImageProcessorPil):
        backend = "torchvision"

    by_name = auto.get_image_processor_class_from_name
    monkeypatch.setattr(auto, "is_torchvision_available", lambda: True)
    monkeypatch.setattr(
        auto,
        "get_image_processor_class_from_name",
        lambda name: TorchvisionProcessor if name == "CLIPImageProcessor" else by_name(name),
    )
    assert AutoImageProcessor.from_pretrained(checkpoint).backend == "torchvision"
    again = VisionEncoder(checkpoint, threads=1)
    assert type(again._processor) is CLIPImageProcessorPil
    assert again.tower_digest == encoder.tower_digest


def test_a_text_only_checkpoint_has_an_encoder_that_refuses_images(
    checkpoint: Path, tmp_path: Path
) -> None:
    text = {"model_type": "llama", "hidden_size": 48, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(text))
    encoder = open_encoder(tmp_path, threads=1)
    assert isinstance(encoder, TextOnlyEncoder)
    service = EncoderService(encoder, FeatureCache(0))
    (encoded,) = service.run([[]])
    assert encoded.features.shape == (0, 48)
    with pytest.raises(Unsupported, match=r"the request has images, but .*'llama' takes text only"):
        service.run([random_images(0, 1)])
    assert isinstance(open_encoder(checkpoint, threads=1), VisionEncoder)


ROWS, HIDDEN = 4, 3
ENTRY_BYTES = ROWS * HIDDEN * 4
PACE = 1e-6
"""Seconds per image of a tower that is known to be fast."""


class FakeEncoder:
    """Encoder whose features are the mean colour of an image, repeated; it records every call.

    hold: called during each call, to delay it. failures: errors that the next calls raise.
    """

    hidden = HIDDEN
    prepare = staticmethod(
        lambda images, options=None: [PreparedImage(image, (2, 2), 4) for image in images]
    )
    preprocess = staticmethod(lambda image: {"rgb": image.rgb})

    def __init__(self, tower_digest="tower", failures=()):
        self.tower_digest = tower_digest
        self.hold = lambda: None
        self.failures = list(failures)
        self.calls = []

    def encode(self, images, part=None):
        self.calls.append(len(images))
        self.hold()
        if self.failures:
            raise self.failures.pop()
        return [self.features_of(image) for image in images]

    @staticmethod
    def features_of(image):
        return np.tile(image["rgb"].mean((0, 1)).astype(np.float32), (ROWS, 1))


def picture(colour, height=2, width=3, is_video=False):
    return DecodedImage(np.full((height, width, 3), colour, np.uint8), is_video)


def service(budget=10**6, **options):
    encoder = FakeEncoder(**options)
    return encoder, EncoderService(encoder, FeatureCache(budget), seconds_per_image=PACE)


def test_a_batch_holds_the_images_that_the_tower_encodes_in_the_target_time(monkeypatch):
    now = iter([0.0, 0.04, 1.0, 1.2, 2.0, 2.001])
    monkeypatch.setattr(features.time, "monotonic", lambda: next(now))
    encoder, _ = service()
    unknown = EncoderService(encoder, FeatureCache(10**6))
    assert unknown.images_per_batch == 1  # before the first call
    encoders = EncoderService(encoder, FeatureCache(10**6), seconds_per_image=PACE)
    encoders.run([[picture(1), picture(2)]])
    assert encoders.images_per_batch == int(features.TARGET_BATCH_SECONDS / 0.02)
    encoders.run([[picture(3)]])  # slower than the target
    assert encoders.images_per_batch == 1
    encoders.run([[picture(4)]])
    assert encoders.images_per_batch == 50


def test_a_batch_of_requests_is_encoded_in_one_call():
    encoder, encoders = service()
    batch = [[picture(1)], [], [picture(2), picture(3, 5, 4, is_video=True)]]
    answers = encoders.run(batch)
    assert encoder.calls == [3]
    assert [answer.features.shape for answer in answers] == [(4, 3), (0, 3), (8, 3)]
    np.testing.assert_array_equal(answers[2].features[4:], np.full((4, 3), 3, np.float32))
    assert answers[2].layout.tolist() == [[0, 4, 1, 2, 2, 0], [4, 4, 1, 2, 2, 1]]
    assert answers[2].size.tolist() == [[2, 3], [5, 4]]
    assert answers[1].layout.shape == (0, 6)
    assert answers[1].size.shape == (0, 2)
    assert answers[1].digests == ()
    for answer in answers:
        assert answer.features.dtype == np.float32
        assert answer.layout.dtype == answer.size.dtype == np.int32
    encoders.check_integrity()


def test_a_cached_image_is_not_encoded_again():
    encoder, encoders = service()
    first = encoders.run([[picture(1), picture(2)], [picture(1)]])
    expected = first[0].features[4:].copy()
    first[0].features[:] = 99
    again = encoders.run([[picture(2)]])
    assert encoder.calls == [2]
    np.testing.assert_array_equal(again[0].features, expected)
    assert first[0].digests[0] == first[1].digests[0] != first[0].digests[1]
    size = first[0].features.nbytes
    assert [answer.features.shape for answer in encoders.run([[], []])] == [(0, HIDDEN)] * 2
    assert encoder.calls == [2], "without images the tower is not called"
    assert encoders.counters == EncoderCounters(images=4, hits=2, misses=2, batches=1, bytes=size)
    encoders.check_integrity()


def test_the_key_depends_on_content_shape_and_tower():
    _, one = service(tower_digest="a")
    _, other = service(tower_digest="b")
    keys = {
        encoders.run([[image]])[0].digests[0]
        for encoders in (one, other)
        for image in (picture(1, 2, 3), picture(1, 3, 2), picture(2, 2, 3))
    }
    assert len(keys) == 6
    still, frame = one.run([[picture(1), picture(1, is_video=True)]])[0].digests
    assert still == frame


def test_many_misses_are_encoded_in_bounded_calls(monkeypatch):
    monkeypatch.setattr(features, "MAX_TOWER_BATCH", 4)
    encoder, encoders = service()
    (answer,) = encoders.run([[picture(i) for i in range(10)]])
    assert encoder.calls == [4, 4, 2]
    np.testing.assert_array_equal(answer.features[::ROWS, 0], np.arange(10, dtype=np.float32))


def test_a_request_with_too_many_image_tokens_is_refused_before_its_images_are_decoded():
    """Each image has four tokens."""
    encoders = EncoderService(FakeEncoder(), FeatureCache(0), context=11)
    encoders.receive(None).plan([PictureSize(3000, 4000, False)] * 2)
    with pytest.raises(
        InvalidArgument, match=r"too long: it has 12 image tokens; the context of 11.*tokens$"
    ):
        encoders.receive(None).plan([PictureSize(3000, 4000, False)] * 3)
    with pytest.raises(InvalidArgument, match=r"fewer than 3 frames; .*video\.num_frames'"):
        encoders.receive(None).plan([PictureSize(3000, 4000, True)] * 3)
    pruned = EncoderService(FakeEncoder(), FeatureCache(0), context=11, pruning_rate=0.25)
    pruned.receive(None).plan([PictureSize(3000, 4000, True)] * 3)
    with pytest.raises(InvalidArgument, match="it has 12 image tokens"):
        pruned.receive(None).plan([PictureSize(3000, 4000, False)] * 3)


def test_the_pixels_of_a_request_for_the_tower_are_counted():
    held = []
    received = EncoderService(FakeEncoder(), FeatureCache(0)).receive(None, held.append)
    received.plan([PictureSize(2, 3, False)] * 2)
    assert all(received.add(picture(colour).rgb) for colour in (1, 2))
    assert held == [18, 18]


def test_the_least_recently_used_entry_is_evicted():
    encoder, encoders = service(budget=2 * ENTRY_BYTES)
    for colour in (1, 2, 1, 3, 1, 2):
        encoders.run([[picture(colour)]])
    assert sum(encoder.calls) == 4  # 1, 2, 3, and again 2, which 3 evicted
    assert encoders.counters.evictions == 2
    encoders.check_integrity()


def test_concurrent_misses_of_one_image_encode_it_once():
    encoder, encoders = service()
    encoder.hold = lambda: until(lambda: encoders.counters.hits == 7)
    start = threading.Barrier(8)

    def ask(i):
        start.wait()
        return encoders.run([[picture(1), picture(10 + i)]])[0]

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(8)))
    assert sum(encoder.calls) == 9
    for i, answer in enumerate(answers):
        assert answer.features[:, 0].tolist() == [1] * ROWS + [10 + i] * ROWS
    assert encoders.counters.hits == 7
    encoders.check_integrity()


def test_waiters_for_a_failed_encoding_get_its_error_and_the_next_call_retries():
    encoder, encoders = service(failures=[RuntimeError("out of memory")])
    encoder.hold = lambda: until(lambda: encoders.counters.hits == 1)
    answers = []

    def ask():
        try:
            encoders.run([[picture(1)]])
        except Internal as error:
            answers.append(error.message)

    leader = threading.Thread(target=ask)
    leader.start()
    until(lambda: encoder.calls)
    ask()
    leader.join()
    assert len(answers) == 2
    assert all("RuntimeError: out of memory" in answer for answer in answers)
    assert encoder.calls == [1]
    encoder.hold = lambda: None
    assert encoders.run([[picture(1)]])[0].features[0, 0] == 1
    encoders.check_integrity()


def test_a_failure_part_way_keeps_the_encoded_images_and_releases_all_waiters(monkeypatch):
    monkeypatch.setattr(features, "MAX_TOWER_BATCH", 2)
    encoder, encoders = service()
    encoder.encode_well = encoder.encode
    calls = []

    def encode(images, part=None):
        calls.append(len(images))
        if len(calls) == 2:
            raise InvalidArgument("too large")
        return encoder.encode_well(images)

    encoder.encode = encode
    with pytest.raises(InvalidArgument, match="too large"):
        encoders.run([[picture(i) for i in range(6)]])
    encoders.run([[picture(i) for i in range(6)]])
    assert calls == [2, 2, 2, 2]
    encoders.check_integrity()


def test_an_encoder_that_returns_too_few_features_is_an_error():
    encoder, encoders = service()
    encoder.encode = lambda images: []
    with pytest.raises(Internal):
        encoders.run([[picture(1)]])
    encoders.check_integrity()


@settings(max_examples=60, deadline=None)
@given(
    batches=st.lists(st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=4), max_size=8),
    entries=st.sampled_from([0, 0.9, 1, 2, 6]),
)
def test_answers_never_depend_on_the_cache(batches, entries):
    encoder, encoders = service(budget=int(entries * ENTRY_BYTES))
    for batch in batches:
        answers = encoders.run([[picture(colour) for colour in request] for request in batch])
        for request, answer in zip(batch, answers, strict=True):
            assert answer.features[::ROWS, 0].tolist() == request
            assert answer.layout[:, 0].tolist() == [i * ROWS for i in range(len(request))]
        encoders.check_integrity()
    assert sum(encoder.calls) == encoders.counters.misses
    assert entries >= 1 or encoders.counters.bytes == 0


def test_tenants_share_no_features():
    encoder, encoders = service()
    batch = [[picture(1)]] * 4
    answers = encoders.run(batch, salts=["alice", "bob", "alice", None])
    assert encoder.calls == [3]
    assert len({answer.digests for answer in answers}) == 1
    encoders.run(batch[:2], salts=["bob", None])
    assert encoder.calls == [3]


def test_images_are_counted_while_a_long_batch_is_encoded():
    """The probe reads the counter to tell a busy encoder from a hung one."""
    encoder, _ = service()
    slow = EncoderService(encoder, FeatureCache(10**6), features.MAX_CALL_SECONDS)
    counted = []
    encoder.hold = lambda: counted.append(slow.counters.images)
    slow.run([[picture(i) for i in range(5)]])
    assert counted[0] == 0
    assert encoder.calls[0] == 1
    assert counted == sorted(set(counted))
    assert slow.counters.images == 5


IMAGE = {"patch_size": 4, "merge_size": 2, "size": {"shortest_edge": 256, "longest_edge": 4096}}
PROCESSOR = SimpleNamespace(to_dict=lambda: IMAGE)


def test_frames_of_qwen3_have_the_size_that_the_stock_processor_gives_them() -> None:
    rng = np.random.default_rng(0)
    for case in range(400):
        frames, height, width = (int(side) for side in rng.integers((2, 3, 3), (9, 120, 120)))
        smallest = int(rng.integers(100, 5000))
        size = {"shortest_edge": smallest, "longest_edge": smallest * int(rng.integers(3, 30))}
        settings: dict[str, Any] = IMAGE | {"size": size}
        if case % 2:
            settings |= {"cap_pixels_per_frame": True, "max_video_tokens": int(rng.integers(3, 40))}
        found = frame_size_of_qwen3(settings, frames, height, width)
        stock = Qwen3VLVideoProcessor(**settings)
        patches = stock.get_num_of_video_patches(frames, height, width)
        assert -(-frames // 2) * found[0] * found[1] == patches * 16
        if not case % 2:
            assert found == smart_resize(frames, height, width, 2, 8, *size.values())


def test_a_clip_of_one_frame_has_the_size_of_two() -> None:
    assert frame_size_of_qwen3(IMAGE, 1, 20, 30) == frame_size_of_qwen3(IMAGE, 2, 20, 30)


@pytest.mark.parametrize(
    ("frames", "tokens", "expected"),
    [
        (8, None, (64, 64)),  # the limit of a frame, 4096 pixels
        (8, 100, (32, 32)),  # 90 tokens of 64 pixels for 4 pairs: 1440 pixels for each
        (8, 1, (16, 16)),  # at least 1.05 times the smallest size, 268 pixels
    ],
)
def test_frames_of_qwen2_are_limited_one_by_one(
    frames: int, tokens: int | None, expected: tuple[int, int]
) -> None:
    cap = {} if tokens is None else {"cap_pixels_per_frame": True, "max_video_tokens": tokens}
    assert frame_size_of_qwen2(IMAGE | cap, frames, 200, 200) == expected


def test_settings_that_have_no_effect_are_logged_once(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "model")
    file = folder / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"max_pixels": 9}))
    for _ in range(2):
        VisionEncoder(folder, 1)
    (message,) = [text for text in caplog.messages if "no effect" in text]
    assert "'max_pixels' in preprocessor_config.json has no effect" in message


def test_settings_are_found_where_transformers_finds_them(tmp_path: Path) -> None:
    def write(name: str, content: dict[str, Any]) -> None:
        (tmp_path / name).write_text(json.dumps(content))

    assert clip_settings(tmp_path, PROCESSOR) == IMAGE
    write("processor_config.json", {"processor_class": "Qwen3VLProcessor"})
    write("video_preprocessor_config.json", {"min_pixels": 9, "max_pixels": 99})
    limits = {"shortest_edge": 9, "longest_edge": 99}
    assert clip_settings(tmp_path, PROCESSOR)["size"] == limits
    write("processor_config.json", {"video_processor": {"size": {"shortest_edge": 1}}})
    assert clip_settings(tmp_path, PROCESSOR)["size"] == IMAGE["size"] | {"shortest_edge": 1}
    (tmp_path / "processor_config.json").write_text("{")
    with pytest.raises(InvalidArgument, match=r"processor_config\.json"):
        clip_settings(tmp_path, PROCESSOR)
