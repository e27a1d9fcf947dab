"""Pretrained teachers: OpenCV's face cascade and the text reader PP-OCR.

Each takes a PIL image and returns the answer for its item. An image without an answer
(None) is left out.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from PIL import Image

from tools.demo.lexicon import COLOURS, SHAPES

MARGIN = 16
"""Width in pixels of a border that repeats the edge, since a face may fill the whole picture."""
BORDER = 3
"""Pixels of background around a text before it is read."""
ENLARGEMENT = 4
MIN_SCORE = 0.8
"""Minimum confidence at which the reader's text is used."""


@cache
def _face_cascade() -> Any:
    from skimage import data
    from skimage.feature import Cascade

    return Cascade(data.lbp_frontal_face_cascade_filename())


def has_face(image: Image.Image) -> str:
    """Return "yes" if OpenCV's LBP cascade, from scikit-image, finds a frontal face, else "no"."""
    pixels = np.pad(np.asarray(image.convert("L")), MARGIN, mode="edge")
    sizes = {"min_size": (40, 40), "max_size": (90, 90), "min_neighbor_number": 1}
    found = _face_cascade().detect_multi_scale(pixels, scale_factor=1.1, step_ratio=1, **sizes)
    return "yes" if found else "no"


@cache
def _reader() -> Any:
    from rapidocr_onnxruntime import RapidOCR

    return RapidOCR()


def read_sign(image: Image.Image) -> str | None:
    """Return the word that PP-OCRv4 reads; None if it is no colour or shape, or was read with low
    confidence.

    This function crops the dark text, and the network only recognises it. Detecting the text with a
    network would take twelve times as long as recognising it.
    """
    grey = np.asarray(image.convert("L")).astype(int)
    rows, columns = np.nonzero(grey < (grey.min() + grey.max()) // 2)
    if not len(rows):
        return None
    box = (columns.min() - BORDER, rows.min() - BORDER, columns.max() + BORDER, rows.max() + BORDER)
    left, top = max(0, box[0]), max(0, box[1])
    crop = image.crop((left, top, min(image.width, box[2] + 1), min(image.height, box[3] + 1)))
    enlarged = crop.resize((crop.width * ENLARGEMENT, crop.height * ENLARGEMENT))
    lines, _ = _reader()(np.asarray(enlarged), use_det=False, use_cls=False)
    if not lines:
        return None
    text, score = lines[0][:2]
    word = str(text).strip().lower()
    return word if word in (*COLOURS, *SHAPES) and float(score) >= MIN_SCORE else None
