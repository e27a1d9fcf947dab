"""Tests of the vision encoder against the stock model on an untrained checkpoint."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoImageProcessor, LlavaForConditionalGeneration
from transformers.models.auto import image_processing_auto as auto
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from vlora.errors import InvalidArgument, Unsupported
from vlora.vision.encoder import TextOnlyEncoder, VisionEncoder, open_encoder
from vlora.vision.features import EncoderService, FeatureCache
from vlora.vision.images import DecodedImage


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
