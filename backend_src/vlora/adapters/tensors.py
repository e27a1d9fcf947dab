"""Weights of an adapter: its safetensors file, checked before anything is read, and their reader.

A thread that releases the GIL must wait to get it back while the engine is busy. So a load makes a
few calls for the whole file instead of some per matrix (decision 47).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO
from weakref import WeakValueDictionary

import torch
from safetensors import SafetensorError

from vlora.adapters.errors import ErrorFactory, open_file
from vlora.adapters.model_shape import Rows
from vlora.atmm.types import LoraPair
from vlora.ids import MatrixId
from vlora.weights.safetensors import (
    FLOATS,
    ReadPlan,
    declared_tensors,
    open_regular,
    open_tensors,
    read_rows,
)

# Maximum size of a file's header. An adapter of 80 layers needs 0.2 MB. One of 9 MB
# takes 1.5 s, in which nobody is served.
MAX_HEADER_BYTES = 2 * 1024 * 1024

PIECE_BYTES = 1 << 20  # Number of bytes that `WeightsFile.equals` reads and compares at a time.


@dataclass
class PairTensors:
    """Keys of one matrix's A and B ("" until found), and the path of its module, as in the file."""

    path: str
    a: str = ""
    b: str = ""
    rank: int = 0
    scale: float = 1.0


class WeightsFile:
    """An open safetensors file of an adapter. It may declare more than the machine's memory, so
    sizes are checked before anything is read. `shapes` has the shape of each tensor by key.
    """

    def __init__(self, path: Path, invalid: ErrorFactory) -> None:
        self._path = path
        self._invalid = invalid
        try:
            with open_file(path, invalid) as opened:
                start = opened.read(8)
                size = int.from_bytes(start, "little")
                if size > MAX_HEADER_BYTES:
                    excess = f"its header has {size} bytes; the limit is {MAX_HEADER_BYTES}"
                    raise invalid(f"is not a complete safetensors file: {excess}")
                self._header = start + opened.read(size)
                self._opened = _open(path, opened)
        except SafetensorError as error:
            raise invalid(f"is not a complete safetensors file: {error}") from error
        except OSError as error:
            raise invalid.unreadable(error) from error
        try:
            self._declared = declared_tensors(self._header)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            # safetensors has accepted the header that it read.
            raise invalid("has changed while it was being read") from None
        self.shapes = {key: one.shape for key, one in sorted(self._declared.items())}

    def _require_float(self, key: str) -> None:
        stored = self._declared[key].type
        if stored not in FLOATS:
            raise self._invalid(f"holds '{key}' as {stored}; supported: {', '.join(FLOATS)}")

    def stored(self, key: str) -> torch.Tensor:
        """Return the tensor as it is stored. Raises InvalidArgument."""
        self._require_float(key)
        try:
            tensor: torch.Tensor = self._opened.get_tensor(key)
        except (SafetensorError, OSError) as error:
            raise self._invalid.unreadable(error) from error
        return tensor

    def read(self, key: str) -> torch.Tensor:
        """Return the tensor in fp32, contiguous. Raises InvalidArgument if it is not
        floating-point, cannot be read, or contains NaN or infinity.
        """
        tensor = self.stored(key).to(torch.float32).contiguous()
        if not bool(torch.isfinite(tensor).all()):
            raise self._invalid(f"has NaN or Inf in '{key}'")
        return tensor

    def equals(self, key: str, expected: Rows) -> bool:
        """Return whether a stored matrix, rounded to the dtype of `expected`, equals `expected`.
        Raises InvalidArgument if the matrix is not floating-point or cannot be read.
        """
        if self.shapes[key] != tuple(expected.shape):
            return False
        self._require_float(key)
        count, width = expected.shape
        kind, _, offset = self._declared[key]
        step = max(1, PIECE_BYTES // (FLOATS[kind].itemsize * max(1, width)))
        try:
            with open_regular(self._path) as file:
                for start in range(0, count, step):
                    rows = range(start, min(start + step, count))
                    piece = expected[rows.start : rows.stop].cpu()
                    stored = read_rows(file, offset, rows, width, kind)
                    if not torch.equal(stored.float().to(piece.dtype), piece):
                        return False
        except EOFError:
            raise self._invalid("cannot be read: it ends early") from None
        except OSError as error:
            raise self._invalid.unreadable(error) from error
        return True

    def require_fits(self, keys: Iterable[str], max_bytes: int, others: int = 0) -> int:
        """Return the size in bytes of these tensors in fp32 plus `others`, those in other files.
        Raises InvalidArgument if it is above `max_bytes`.
        """
        needed = others + sum(4 * math.prod(self.shapes[key]) for key in keys)
        if needed > max_bytes:
            allowed = f"'max_adapter_bytes' allows {max_bytes}"
            raise self._invalid(f"declares weights of {needed} bytes; {allowed}")
        return needed

    def reader(self, pairs: Mapping[MatrixId, PairTensors]) -> WeightsReader:
        """Return a reader of these matrices. Thousands of adapters of one kind, whose headers are
        equal, share one reader. Raises InvalidArgument for an unsupported type.
        """
        for key in self._declared:
            self._require_float(key)
        ranks = {matrix: pair.rank for matrix, pair in pairs.items()}
        scales = tuple(pair.scale for pair in pairs.values())
        kind = (len(self._header), hash(self._header), tuple(ranks.items()), scales)
        reader = _READERS.get(kind)
        if reader is None:
            order = [*(pair.a for pair in pairs.values()), *(pair.b for pair in pairs.values())]
            shapes = tuple((self.shapes[key][0], self.shapes[key][1]) for key in order)
            plan = ReadPlan.of(self._header, order)
            reader = _READERS[kind] = WeightsReader(plan, ranks, scales, shapes)
        return reader


def _open(path: Path, opened: BinaryIO) -> Any:
    try:
        return open_tensors(opened)
    except FileNotFoundError:
        # safe_open reports any failure to open a file as a missing file. This raises the real one.
        open_regular(path).close()
        raise


@dataclass(frozen=True)
class WeightsReader:
    """Reads the weights of one adapter file, as planned when the file was checked.

    plan: reads A of all matrices and then B of all.
    ranks, scales: rank and scale of each matrix, in the order of the matrices.
    shapes: shape of each tensor, in the order of the plan.
    """

    plan: ReadPlan
    ranks: Mapping[MatrixId, int]
    scales: tuple[float, ...]
    shapes: tuple[tuple[int, int], ...]

    @property
    def nbytes(self) -> int:
        return 4 * sum(self._sizes)

    def read(self, path: Path, invalid: ErrorFactory) -> tuple[dict[MatrixId, LoraPair], str]:
        """Return (A and B by matrix, digest). A and B are fp32, with the scale folded into B.

        The digest is the SHA-256 of the ids of the matrices, and of the shapes and values of A and
        B. Raises InvalidArgument if the file cannot be read or contains NaN or infinity.
        """
        state = hashlib.sha256(self._declared)
        if not self.shapes:
            return {}, state.hexdigest()
        flat = self.plan.read(path, invalid)
        for scale, start, end in self._scaled_ranges:
            flat[start:end].mul_(scale)
        if not all(map(math.isfinite, torch.aminmax(flat))):
            unscaled = self.plan.read(path, invalid)
            raise invalid(self._reason_not_finite(unscaled))
        state.update(flat.numpy().data)
        return _split_pairs(flat, self.ranks, self.shapes), state.hexdigest()

    def _reason_not_finite(self, flat: torch.Tensor) -> str:  # `flat` is not yet scaled.
        scales = (1.0,) * len(self.ranks) + self.scales
        tensors = flat.split_with_sizes(self._sizes)
        for key, values, scale in zip(self.plan.keys, tensors, scales, strict=True):
            if not bool(torch.isfinite(values).all()):
                return f"has NaN or Inf in '{key}'"
            if not bool(torch.isfinite(values * scale).all()):
                return f"has '{key}', which overflows {values.dtype} once scaled by {scale:g}"
        return "has changed while it was being loaded"

    @cached_property
    def _sizes(self) -> list[int]:
        return [math.prod(shape) for shape in self.shapes]

    @cached_property
    def _scaled_ranges(self) -> list[tuple[float, int, int]]:
        count = len(self.ranks)
        start, ranges = sum(self._sizes[:count]), []
        scales_of_b = zip(self.scales, self._sizes[count:], strict=True)
        for scale, run in groupby(scales_of_b, key=itemgetter(0)):
            end = start + sum(size for _, size in run)
            if scale != 1.0:
                ranges.append((scale, start, end))
            start = end
        return ranges

    @cached_property
    def _declared(self) -> bytes:
        return repr((tuple(self.ranks), self.shapes)).encode()


# Readers that are in use, by the header of their files and the ranks and scales.
_READERS: WeakValueDictionary[tuple[object, ...], WeightsReader] = WeakValueDictionary()


def _split_pairs(
    flat: torch.Tensor, matrices: Iterable[MatrixId], shapes: Sequence[tuple[int, ...]]
) -> dict[MatrixId, LoraPair]:
    parts = flat.split_with_sizes([math.prod(shape) for shape in shapes])
    factors = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
    count = len(factors) // 2
    pairs = map(LoraPair, factors[:count], factors[count:])
    return dict(zip(matrices, pairs, strict=True))
