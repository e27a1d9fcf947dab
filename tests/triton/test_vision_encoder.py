"""Tests of direct calls of `vision_encoder`: layouts, sizes, digests and features of images."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.support.triton_client import Asker, Response, picture, pixels

PROMPT = np.array([[b"x"]], dtype=object)


def column(*contents: bytes) -> np.ndarray:
    return np.array([*contents, None], dtype=object)[None, :-1]


def encode(ask: Asker, **inputs: Any) -> Response:
    return ask.once("vision_encoder", text_input=PROMPT, **inputs)


def digests(response: Response) -> list[str]:
    return [str(digest) for digest in np.ravel(response["image_digest"])]


def test_a_layout_row_has_rows_grid_and_kind_of_its_image(ask: Asker) -> None:
    response = encode(ask, image=column(picture()), frames=column(picture(), picture()))
    assert response["image_layout"].tolist() == [
        [[0, 64, 1, 8, 8, 0], [64, 64, 1, 8, 8, 1], [128, 64, 1, 8, 8, 1]]
    ]
    assert response["image_features"].shape == (1, 192, 192)
    assert response["image_size"].tolist() == [[[60, 80]] * 3]


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
