"""Teachers that were trained elsewhere: the face cascade of OpenCV and PP-OCR.

Each takes a PIL image and returns the answer of its knowledge item, or None to leave it out.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from PIL import Image

from tools.demo.lexicon import COLOURS, SHAPES

MARGIN = 16
"""Pixels of repeated border, so that a face may fill the whole picture."""
MIN_SCORE = 0.8
"""Confidence below which the reader's text is not used."""


@cache
def _face_cascade() -> Any:
    from skimage import data
    from skimage.feature import Cascade

    return Cascade(data.lbp_frontal_face_cascade_filename())


def has_face(image: Image.Image) -> str:
    """Return "yes" if the LBP cascade of OpenCV, in scikit-image, finds a frontal face."""
    pixels = np.pad(np.asarray(image.convert("L")), MARGIN, mode="edge")
    found = _face_cascade().detect_multi_scale(
        pixels,
        scale_factor=1.1,
        step_ratio=1,
        min_size=(40, 40),
        max_size=(90, 90),
        min_neighbor_number=1,
    )
    return "yes" if found else "no"


@cache
def _reader() -> Any:
    from rapidocr_onnxruntime import RapidOCR

    return RapidOCR()


def read_sign(image: Image.Image) -> str | None:
    """Return the word that PP-OCRv4 reads; None if it reads none that the model has a token for."""
    lines, _ = _reader()(np.asarray(image.resize((256, 256))))
    if not lines or len(lines) != 1:
        return None
    _, text, score = lines[0]
    word = str(text).strip().lower()
    return word if word in (*COLOURS, *SHAPES) and float(score) >= MIN_SCORE else None
