"""Contents of a load's requests: texts of a number of tokens, and pictures, none of them twice.

Texts and pictures that repeat would be found in the server's caches.
"""

from __future__ import annotations

import io
import random
from dataclasses import dataclass

from PIL import Image, ImageDraw

from vlora.load.trace import TracedRequest

WORDS = tuple("what is the color of the red square in this picture and which are on it".split())  # noqa: SIM905
"""Words that have the same number of tokens, with the space before each: one, in the demo's
checkpoint and most others.
"""


@dataclass(frozen=True)
class TokenCount:
    """Number of prompt tokens of a text of words: `fixed` + `per_word` · words."""

    fixed: float = 0.0
    per_word: float = 1.0

    @classmethod
    def of(cls, short: tuple[int, int], long: tuple[int, int]) -> TokenCount:
        """Return the count that two texts have shown, each as (words, tokens)."""
        per_word = (long[1] - short[1]) / (long[0] - short[0])
        return cls(short[1] - per_word * short[0], per_word) if per_word > 0 else cls()

    def words(self, tokens: int) -> int:
        return max(1, round((tokens - self.fixed) / self.per_word))


@dataclass(frozen=True)
class Content:
    """Content of one request: a text, and JPEG files as independent images or as one clip."""

    text: str
    images: tuple[bytes, ...] = ()
    frames: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class ContentMaker:
    """Makes the contents of requests, each from the seed and the request's place alone.

    images, frames: number of pictures of each request. side: width and height in pixels.
    """

    seed: int
    count: TokenCount
    images: int = 0
    frames: int = 0
    side: int = 256

    def make(self, place: int, request: TracedRequest) -> Content:
        rng = random.Random(f"{self.seed} {place}")
        words = rng.choices(WORDS, k=self.count.words(request.prompt))
        images = [self._pictures(rng, 1)[0] for _ in range(self.images)]
        return Content(" ".join(words), tuple(images), tuple(self._pictures(rng, self.frames)))

    def _pictures(self, rng: random.Random, count: int) -> list[bytes]:
        """Return pictures of a square that moves to the right."""
        ground, square = (tuple(rng.randrange(256) for _ in range(3)) for _ in range(2))
        size, top = self.side // 4, rng.randrange(self.side)
        files = []
        for number in range(count):
            image = Image.new("RGB", (self.side, self.side), ground)
            left = self.side * number // max(1, count)
            ImageDraw.Draw(image).rectangle((left, top, left + size, top + size), fill=square)
            # Noise in one corner makes every picture a new one.
            image.paste(Image.frombytes("RGB", (8, 8), rng.randbytes(192)), (0, 0))
            encoded = io.BytesIO()
            image.save(encoded, "JPEG", quality=90)
            files.append(encoded.getvalue())
        return files
