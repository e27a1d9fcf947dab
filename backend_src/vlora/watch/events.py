"""Events of the alerts, their names, and their pictures."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from vlora.watch.answers import Answer

MAX_TEXT = 4000  # Maximum number of characters of an answer in an event.
MAX_SLUG = 40


@dataclass(frozen=True)
class Event:
    """An event that has begun, or one that has ended.

    begin, end: Unix seconds of the first and the last frame for which the condition held; `end` is
      None as long as it lasts. score: see `Condition.score_of`.
    answer: the answer with the highest score of those that began the event.
    reason: why it ended: "over", "silence", "changed" (its rule or camera), "stopped" or "killed"
      (the process); empty as long as it lasts.
    """

    camera: str
    rule: str
    begin: float
    end: float | None
    score: float
    answer: Answer
    reason: str = ""

    @property
    def id(self) -> str:
        """Name for receivers and files: time of the begin, camera, and a digest of all. It has only
        the characters A-Z, a-z, 0-9, `.`, `_` and `-`, and does not begin with a dot."""
        time = datetime.fromtimestamp(self.begin, UTC).strftime("%Y%m%dT%H%M%S.%f")[:-3]
        slug = re.sub(r"[^A-Za-z0-9_-]+", "_", self.camera)[:MAX_SLUG]
        parts = "\0".join((self.camera, self.rule, repr(self.begin)))
        digest = hashlib.sha256(parts.encode("utf-8", "surrogatepass")).hexdigest()[:8]
        return f"{time}Z-{slug}-{digest}"

    def ended_at(self, end: float, reason: str) -> Event:
        return replace(self, end=max(end, self.begin), reason=reason)

    def as_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "kind": "begin" if self.end is None else "end",
            "camera": self.camera,
            "rule": self.rule,
            "begin": self.begin,
            "end": self.end,
            "reason": self.reason or None,
            "score": self.score,
            "text": self.answer.text[:MAX_TEXT],
            "adapter": self.answer.adapter,
            "digest": self.answer.digest,
            "objects": list(self.answer.objects),
        }
