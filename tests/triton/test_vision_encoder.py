"""Tests of direct calls of `vision_encoder`: layouts, sizes, digests and features of images."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.support.triton_client import Asker, Refused, Response, picture, pixels

PROMPT = np.array([[b"x"]], dtype=object)


def column(*contents: bytes) -> np.ndarray:
    return np.array([*contents, None], dtype=object)[None, :-1]


def encode(ask: Asker, **inputs: Any) -> Response:
    return ask.once("vision_encoder", text_input=PROMPT, **inputs)


def saved(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    content = io.BytesIO()
    image.save(content, kind, **options)
    return content.getvalue()


def digests(response: Response) -> list[str]:
    return [str(digest) for digest in np.ravel(response["image_digest"])]


def test_a_layout_row_has_rows_grid_and_kind_of_its_image(ask: Asker) -> None:
    response = encode(ask, image=column(picture()), frames=column(picture(), picture()))
    assert response["image_layout"].tolist() == [
        [[0, 64, 1, 8, 8, 0], [64, 64, 1, 8, 8, 1], [128, 64, 1, 8, 8, 1]]
    ]
    assert response["image_features"].shape == (1, 192, 192)
    assert response["image_size"].tolist() == [[[60, 80]] * 3]


def test_a_request_without_images_gets_zero_rows(ask: Asker) -> None:
    response = encode(ask)
    assert response["image_features"].shape == (1, 0, 192)
    assert response["image_layout"].shape == (1, 0, 6)
    assert response["image_size"].shape == (1, 0, 2)


def test_the_size_is_that_after_the_exif_orientation(ask: Asker) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # Rotate by 90 degrees.
    rotated = saved(Image.open(io.BytesIO(picture())), "JPEG", exif=exif, quality=95)
    assert encode(ask, image=column(rotated))["image_size"].tolist() == [[[80, 60]]]


def test_transparent_pixels_become_white(ask: Asker) -> None:
    clear = saved(Image.new("RGBA", (20, 20), (255, 0, 0, 0)))
    white = saved(Image.new("RGB", (20, 20), (255, 255, 255)))
    one, other = digests(encode(ask, image=column(clear, white)))
    assert one == other


def test_sixteen_bit_pixels_are_scaled_to_eight_bits(ask: Asker) -> None:
    deep = saved(Image.fromarray(np.full((20, 20), 257 * 100, np.uint16)))
    plain = saved(Image.fromarray(np.full((20, 20), 100, np.uint8)))
    one, other = digests(encode(ask, image=column(deep, plain)))
    assert one == other


def test_an_animated_file_is_accepted_as_frames_and_rejected_as_an_image(ask: Asker) -> None:
    frames = [Image.new("RGB", (8, 8), (i * 50, 0, 0)) for i in range(3)]
    animated = saved(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert encode(ask, frames=column(animated))["image_layout"].shape == (1, 3, 6)
    with pytest.raises(Refused, match=r"INVALID_ARG: .*animated"):
        encode(ask, image=column(animated))


def test_raw_frames_have_the_digests_of_encoded_ones(ask: Asker) -> None:
    clip = [picture((i, 0, 0)) for i in range(3)]
    encoded = encode(ask, frames=column(*clip))
    raw = encode(ask, frames_raw=pixels(clip)[None])
    assert digests(encoded) == digests(raw)
    np.testing.assert_array_equal(encoded["image_features"], raw["image_features"])


def test_features_do_not_depend_on_other_images_of_the_batch(ask: Asker) -> None:
    alone = encode(ask, image=column(picture((5, 5, 5))))["image_features"][0]
    others = [picture((i, 99, 1)) for i in range(7)]
    together = encode(ask, image=column(picture((5, 5, 6)), *others, picture((5, 5, 5))))
    np.testing.assert_allclose(together["image_features"][0][-64:], alone, atol=1e-4)


def test_digests_are_not_inputs_of_any_model(ask: Asker) -> None:
    for model in ("lmm", "lmm_unary"):
        config = ask.client.get_model_config(model).config
        assert "image_digest" not in {tensor.name for tensor in config.input}


def test_images_with_other_pixels_have_other_digests(ask: Asker) -> None:
    one, other = picture((9, 9, 9)), picture((9, 9, 8))
    first, second = digests(encode(ask, image=column(one, other)))
    assert digests(encode(ask, image=column(one))) == [first] != [second]
