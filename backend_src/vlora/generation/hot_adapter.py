"""Choice of the hot adapter, which is merged into the base, from a log of requests.

The work of LoRA for one row is proportional to the sum of rank · (d_in + d_out) over the matrices
that the adapter changes. Merging the hot adapter saves its own work. But all other adapters become
delta adapters, which must also subtract the hot one. This adds the hot adapter's work to every
other request.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vlora.errors import InvalidArgument
from vlora.ids import MatrixId
from vlora.lora.model_shape import ModelShape

NAME_KEYS = ("lora_name", "adapter", "model")
"""Keys that may name the adapter in a request log. The first one that is present is used."""
BASE_NAME = ""
"""Name by which requests without an adapter are counted."""
MAX_LINE_BYTES = 1 << 20


@dataclass(frozen=True)
class HotChoice:
    """The adapter to merge, and what merging it saves.

    hot: name of the adapter to merge; None if every merge would increase the work.
    work_before: mean number of LoRA's multiplications per row, with no adapter merged.
    work_after: mean number of LoRA's multiplications per row, with `hot` merged.
    """

    hot: str | None
    work_before: float
    work_after: float


def lora_work(ranks: Mapping[MatrixId, int], shape: ModelShape) -> int:
    """Return the number of multiplications of an adapter per row: the sum of rank · (d_in + d_out).

    ranks: rank of each matrix that the adapter changes.
    """
    return sum(rank * sum(shape.shape_of(matrix)) for matrix, rank in ranks.items())


def work_after_merge(requests: Mapping[str, int], work: Mapping[str, int], hot: str) -> float:
    """Return the mean work per row with `hot` merged into the base.

    requests: number of requests by adapter; `BASE_NAME` stands for the base.
    work: `lora_work` of each adapter.
    """
    total = sum(requests.values())
    others = (count * (work.get(name, 0) + work[hot]) for name, count in requests.items())
    return (sum(others) - requests.get(hot, 0) * 2 * work[hot]) / total


def choose_hot(requests: Mapping[str, int], work: Mapping[str, int]) -> HotChoice:
    """Return the adapter whose merge makes the mean request cheapest.

    requests: number of requests by adapter. Those for adapters that are not in `work` count as
        requests for the base.
    work: `lora_work` of each adapter.

    Raises InvalidArgument if there are no requests.
    """
    total = sum(requests.values())
    if not total:
        raise InvalidArgument("the request log holds no request")
    before = sum(count * work.get(name, 0) for name, count in requests.items()) / total
    costs = {name: work_after_merge(requests, work, name) for name in sorted(work)}
    hot = min(costs, key=costs.__getitem__, default=None)
    if hot is None or costs[hot] >= before:
        return HotChoice(None, before, before)
    return HotChoice(hot, before, costs[hot])


def read_request_log(path: Path) -> Counter[str]:
    """Return the number of requests by adapter.

    Each line is a JSON object with one of NAME_KEYS, or just the adapter's name. A null or empty
    name stands for the base. Empty lines are skipped. Raises InvalidArgument, which names the file
    and the line.
    """
    counts: Counter[str] = Counter()
    try:
        with path.open("rb") as opened:
            for number, line in enumerate(
                iter(lambda: opened.readline(MAX_LINE_BYTES + 1), b""), 1
            ):
                if len(line) > MAX_LINE_BYTES:
                    raise InvalidArgument(
                        f"{path}: line {number} has more than {MAX_LINE_BYTES} bytes"
                    )
                if text := _decode(line, path, number).strip():
                    counts[_name_in(text, path, number)] += 1
    except OSError as error:
        raise InvalidArgument(f"{path} cannot be read: {error.strerror}") from error
    return counts


def _decode(line: bytes, path: Path, number: int) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError:
        raise InvalidArgument(f"{path}: line {number} is not UTF-8 text") from None


def _name_in(text: str, path: Path, number: int) -> str:
    """Return the adapter's name in one line of a request log."""
    if not text.startswith("{"):
        return text
    try:
        request = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{path}: line {number} is not a JSON object: {error}") from error
    for key in NAME_KEYS:
        if key in request:
            name = request[key]
            if name is not None and not isinstance(name, str):
                raise InvalidArgument(
                    f"{path}: line {number} has {key} = {name!r}, which is not a name"
                )
            return name or BASE_NAME
    raise InvalidArgument(f"{path}: line {number} names no adapter; use the key '{NAME_KEYS[0]}'")
