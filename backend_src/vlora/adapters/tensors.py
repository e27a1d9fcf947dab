"""Reader of an adapter's weights: one read, one cast, one check for NaN and one digest per file.

A thread that releases the GIL must wait to get it back while the engine is busy. So a load makes a
few calls for the whole file instead of some per matrix (decision 50). The reader is made when the
file is checked. This module handles no names, configs or patterns.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby
from operator import itemgetter
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
from safetensors import SafetensorError, safe_open

from vlora.adapters.errors import ErrorFactory, require_file
from vlora.adapters.model_shape import LM_HEAD, ModelShape, Rows, paths_of
from vlora.adapters.peft import CONVERT, PeftConfig, TensorKey, UnknownKey, parse_key
from vlora.atmm.types import LoraPair
from vlora.ids import MatrixId

FLOATS = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F64": torch.float64,
}
"""Supported types of the tensors in a file. Types of 8 bits are not supported, since they need
scales.
"""

MAX_BUFFERS = 1024
"""Maximum number of buffers per call of `preadv` (IOV_MAX)."""


@dataclass(frozen=True)
class Layout:
    """Tensors of a safetensors file, in their order in the file. There are no gaps between them.

    start: number of bytes in the file before the first tensor.
    header: Python's `hash` of these bytes, which shows whether the file has changed. The hash is
        valid in this process only.
    keys: key of each tensor.
    types: type of each tensor, a key of FLOATS.
    sizes: number of elements of each tensor.
    """

    start: int
    header: int
    keys: tuple[str, ...]
    types: tuple[str, ...]
    sizes: tuple[int, ...]

    def read(self, path: Path, plan: ReadPlan, invalid: ErrorFactory) -> torch.Tensor:
        """Return the wanted tensors of the plan, in its order, as one tensor [elements] fp32.

        invalid: makes the error for the adapter and file.

        Raises InvalidArgument if the file cannot be read or has changed since it was checked.
        """
        size = plan.runs[-1][2]
        header, data = bytearray(self.start), torch.empty(size, dtype=torch.uint8)
        wanted = data.numpy().data
        parts = (wanted[a:b] if b <= size else b - a for a, b in plan.targets)
        try:
            _read_into(path, [memoryview(header), *parts])
        except (OSError, EOFError) as error:
            raise invalid(f"cannot be read: {error}") from error
        if hash(bytes(header)) != self.header:
            raise invalid("has changed since it was described")
        runs = []
        for dtype, start, end in plan.runs:
            run = data[start:end]
            if start % dtype.itemsize:
                run = run.clone()  # Smaller dtypes before the run leave it unaligned.
            runs.append(run.view(dtype).to(torch.float32))
        return runs[0] if len(runs) == 1 else torch.cat(runs)

    def offset(self, key: str) -> int:
        """Return the position of a tensor in the file, in bytes."""
        before = range(self.keys.index(key))
        return self.start + sum(self.sizes[i] * FLOATS[self.types[i]].itemsize for i in before)

    def read_plan(self, wanted: Sequence[int]) -> ReadPlan:
        """Return a plan that reads only the `wanted` tensors, and puts them into memory in this
        order.

        wanted: indices of tensors.
        """
        order = [*wanted, *sorted(set(range(len(self.keys))) - set(wanted))]
        dtypes = [FLOATS[self.types[index]] for index in order]
        sizes = (self.sizes[i] * dtype.itemsize for i, dtype in zip(order, dtypes, strict=True))
        ends = list(accumulate(sizes))
        ranges = zip([0, *ends[:-1]], ends, strict=True)
        targets = [target for _, target in sorted(zip(order, ranges, strict=True))]
        runs = []
        start = 0
        ends_by_dtype = zip(dtypes[: len(wanted)], ends[: len(wanted)], strict=True)
        for dtype, run in groupby(ends_by_dtype, key=itemgetter(0)):
            *_, (_, end) = run
            runs.append((dtype, start, end))
            start = end
        return ReadPlan(tuple(targets), tuple(runs))


@dataclass(frozen=True)
class ReadPlan:
    """Ranges of memory into which the tensors of a file are read.

    The ranges of the wanted tensors come first. All other tensors have ranges after these, but are
    not read.

    targets: range (start, end) of each tensor in memory, in bytes, in the order of the file.
    runs: (dtype, start, end) of contiguous wanted tensors with the same dtype, in bytes of memory.
    """

    targets: tuple[tuple[int, int], ...]
    runs: tuple[tuple[torch.dtype, int, int], ...]


def _read_into(path: Path, parts: Sequence[memoryview | int]) -> None:
    """Fill buffers from the start of the file.

    parts: buffers to fill, in order. A number among them is a number of bytes to skip.

    The file is not mapped, because truncating a mapped file would end the process.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        offset, contiguous = 0, list[memoryview]()
        for part in (*parts, 0):
            if isinstance(part, memoryview):
                contiguous.append(part)
            else:
                offset = _fill(descriptor, offset, contiguous) + part
                contiguous = []
    finally:
        os.close(descriptor)


def _fill(descriptor: int, offset: int, buffers: Sequence[memoryview]) -> int:
    """Fill buffers with the content of a file from `offset` on; return the offset after it."""
    left = [buffer for buffer in buffers if buffer.nbytes]
    while left:
        count = os.preadv(descriptor, left[:MAX_BUFFERS], offset)
        if count == 0:
            raise EOFError("it ends early")
        offset += count
        while left and count >= left[0].nbytes:
            count -= left.pop(0).nbytes
        if count:
            left[0] = left[0][count:]
    return offset


def _split_pairs(
    flat: torch.Tensor, matrices: Iterable[MatrixId], shapes: Sequence[tuple[int, ...]]
) -> dict[MatrixId, LoraPair]:
    """Return A and B of each matrix as views of one tensor.

    flat: [elements], A of all matrices and then B of all.
    shapes: shapes of these tensors in the same order.
    """
    parts = flat.split_with_sizes([math.prod(shape) for shape in shapes])
    factors = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
    count = len(factors) // 2
    return {
        matrix: LoraPair(a, b)
        for matrix, a, b in zip(matrices, factors[:count], factors[count:], strict=True)
    }


@dataclass(frozen=True)
class WeightsReader:
    """Reads the weights of one adapter file.

    layout: tensors of the file.
    ranks: rank of each matrix, in the order of the matrices.
    scales: scale of each matrix, in the same order.
    order: index of each tensor in the layout. A of all matrices comes first, then B of all.
    shapes: shape of each tensor, in the same order.
    """

    layout: Layout
    ranks: Mapping[MatrixId, int]
    scales: tuple[float, ...]
    order: tuple[int, ...]
    shapes: tuple[tuple[int, int], ...]

    @property
    def nbytes(self) -> int:
        """Number of bytes of the weights in fp32."""
        return 4 * sum(math.prod(shape) for shape in self.shapes)

    def shared(self) -> WeightsReader:
        """Return an equal reader if one exists already, else this reader.

        In this way, thousands of adapters of one kind share one reader.
        """
        key = (self.layout.start, self.layout.header, tuple(self.ranks.items()), self.scales)
        return _READERS.setdefault(key, self)

    def read(self, path: Path, invalid: ErrorFactory) -> tuple[dict[MatrixId, LoraPair], str]:
        """Return (A and B by matrix, digest). A and B are fp32, with the scale folded into B.

        The digest is the SHA-256 of the ids of the matrices, and of the shapes and values of A and
        B. The file is not read if there are no matrices. Raises InvalidArgument if the file cannot
        be read or contains NaN or infinity.
        """
        if not self.order:
            return {}, hashlib.sha256(self._declared).hexdigest()
        flat = self._values(path, invalid)
        for scale, start, end in self._scaled_ranges:
            flat[start:end].mul_(scale)
        if not all(map(math.isfinite, torch.aminmax(flat))):
            raise invalid(self._reason_not_finite(self._values(path, invalid)))
        state = hashlib.sha256(self._declared)
        state.update(flat.numpy().data)
        return _split_pairs(flat, self.ranks, self.shapes), state.hexdigest()

    def _values(self, path: Path, invalid: ErrorFactory) -> torch.Tensor:
        """Return the stored values in fp32, not yet scaled."""
        return self.layout.read(path, self._plan, invalid)

    def _reason_not_finite(self, flat: torch.Tensor) -> str:
        """Return what is wrong with the first tensor that is not finite, before or
        after scaling.
        """
        scales = (1.0,) * len(self.ranks) + self.scales
        tensors = flat.split_with_sizes(self._sizes)
        for index, values, scale in zip(self.order, tensors, scales, strict=True):
            key = self.layout.keys[index]
            if not bool(torch.isfinite(values).all()):
                return f"has NaN or Inf in '{key}'"
            if not bool(torch.isfinite(values * scale).all()):
                return f"has '{key}', which overflows {values.dtype} once scaled by {scale:g}"
        return "has changed while it was being loaded"

    @cached_property
    def _plan(self) -> ReadPlan:
        return self.layout.read_plan(self.order)

    @cached_property
    def _sizes(self) -> list[int]:
        return [self.layout.sizes[index] for index in self.order]

    @cached_property
    def _scaled_ranges(self) -> list[tuple[float, int, int]]:
        """Ranges of adjacent elements with a scale other than 1, as (scale, start, end)."""
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


_READERS: WeakValueDictionary[tuple[object, ...], WeightsReader] = WeakValueDictionary()
"""Readers that are in use, by the key that `WeightsReader.shared` computes."""


# Safetensors files of an adapter's folder: their declared tensors, and reading of single small
# tensors.
#
# Sizes are checked before anything is read, because a file may declare more than the machine's
# memory.


MAX_HEADER_BYTES = 16 * 1024 * 1024
"""Maximum size of a file's header. An adapter of 80 layers needs 0.2 MB."""

PIECE_BYTES = 1 << 20
"""Number of bytes that `WeightsFile.equals` reads and compares at a time."""


def _open(path: Path) -> Any:
    # The file is not mapped, because truncating a mapped file would end the process.
    try:
        return safe_open(path, framework="pt", backend="pread")
    except FileNotFoundError:
        # safe_open reports any failure to open a file as a missing file. This raises the real one.
        path.open("rb").close()
        raise


class WeightsFile:
    """An open safetensors file.

    shapes: shape of each declared tensor by its key.
    """

    def __init__(self, path: Path, invalid: ErrorFactory) -> None:
        """Open the file. Raise InvalidArgument if it is missing, not a regular file, or broken."""
        self._path = path
        self._invalid = invalid
        require_file(path, invalid)
        try:
            with path.open("rb") as opened:
                start = opened.read(8)
                header = int.from_bytes(start, "little")
                if header > MAX_HEADER_BYTES:
                    raise invalid(
                        f"is not a complete safetensors file: its header has {header} bytes;"
                        f" the limit is {MAX_HEADER_BYTES}"
                    )
                self._header = start + opened.read(header)
            self._opened = _open(path)
        except SafetensorError as error:
            raise invalid(f"is not a complete safetensors file: {error}") from error
        except OSError as error:
            raise invalid(f"cannot be read: {error}") from error
        slices = {key: self._opened.get_slice(key) for key in self._opened.keys()}  # noqa: SIM118
        self.shapes: dict[str, tuple[int, ...]] = {
            key: tuple(declared.get_shape()) for key, declared in slices.items()
        }
        self._types = {key: str(declared.get_dtype()) for key, declared in slices.items()}

    @property
    def layout(self) -> Layout:
        """Layout of the file, by which `WeightsReader` finds the weights in the file.

        Raises InvalidArgument if a tensor does not have a supported floating-point type.
        """
        keys = tuple(self._opened.offset_keys())
        for key in keys:
            self._require_float(key)
        return Layout(
            start=len(self._header),
            header=hash(self._header),
            keys=keys,
            types=tuple(self._types[key] for key in keys),
            sizes=tuple(math.prod(self.shapes[key]) for key in keys),
        )

    def _require_float(self, key: str) -> None:
        if self._types[key] not in FLOATS:
            raise self._invalid(
                f"holds '{key}' as {self._types[key]}; supported: {', '.join(FLOATS)}"
            )

    def stored(self, key: str) -> torch.Tensor:
        """Return the tensor as it is stored.

        Raises InvalidArgument if it is not floating-point or cannot be read.
        """
        self._require_float(key)
        try:
            tensor: torch.Tensor = self._opened.get_tensor(key)
        except (SafetensorError, OSError) as error:
            raise self._invalid(f"cannot be read: {error}") from error
        return tensor

    def read(self, key: str) -> torch.Tensor:
        """Return the tensor in fp32, contiguous.

        Raises InvalidArgument if it is not floating-point, cannot be read, or contains NaN or
        infinity.
        """
        tensor = self.stored(key).to(torch.float32).contiguous()
        if not bool(torch.isfinite(tensor).all()):
            raise self._invalid(f"has NaN or Inf in '{key}'")
        return tensor

    def equals(self, key: str, expected: Rows) -> bool:
        """Return whether a stored matrix, rounded to the dtype of `expected`, equals `expected`.

        Raises InvalidArgument if a tensor of the file is not floating-point, or if the file cannot
        be read.
        """
        if self.shapes[key] != tuple(expected.shape):
            return False
        offset, dtype = self.layout.offset(key), FLOATS[self._types[key]]
        count, width = expected.shape
        rows = max(1, PIECE_BYTES // (dtype.itemsize * max(1, width)))
        try:
            with self._path.open("rb") as file:
                file.seek(offset)
                for start in range(0, count, rows):
                    piece = expected[start : start + rows].flatten().cpu()
                    stored = bytearray(file.read(len(piece) * dtype.itemsize))
                    if len(stored) < len(piece) * dtype.itemsize:
                        raise self._invalid("cannot be read: it ends early")
                    same = torch.frombuffer(stored, dtype=dtype).float().to(piece.dtype)
                    if not torch.equal(same, piece):
                        return False
        except OSError as error:
            raise self._invalid(f"cannot be read: {error}") from error
        return True

    def require_fits(self, keys: Iterable[str], max_bytes: int, others: int = 0) -> int:
        """Return the size in bytes of these tensors in fp32 plus `others`.

        others: size in bytes of the adapter's weights in other files.

        Raises InvalidArgument if the sum is above `max_bytes`.
        """
        needed = others + sum(4 * math.prod(self.shapes[key]) for key in keys)
        if needed > max_bytes:
            raise self._invalid(
                f"declares weights of {needed} bytes; 'max_adapter_bytes' allows {max_bytes}"
            )
        return needed


# LoRA factors A and B of an adapter's matrices: assignment of the file's tensors to them, and
# checks that they fit the model.


@dataclass
class PairKeys:
    """Keys of one matrix's A and B in the weights file.

    path: path of the matrix's module, as the file spells it.
    a, b: keys of A and B; None until they are found.
    """

    path: str
    a: str | None = None
    b: str | None = None


def assign_tensors(
    file: WeightsFile, model: ModelShape, invalid: ErrorFactory
) -> dict[MatrixId, PairKeys]:
    """Return the keys of each matrix's A and B.

    Raises InvalidArgument for a tensor that belongs to no matrix, except an unchanged copy of the
    base model's LM head.
    """
    keys: dict[MatrixId, PairKeys] = {}
    for key in file.shapes:
        try:
            parsed = parse_key(key, model)
        except UnknownKey as reason:
            raise invalid(f"holds '{key}', {reason}") from None
        if parsed.part == "magnitude":
            raise invalid(f"holds '{key}', a DoRA magnitude; make it a plain LoRA with {CONVERT}")
        if parsed.part == "weight":
            _check_copy(file, key, parsed, model, invalid)
            continue
        assert parsed.matrix is not None
        pair = keys.setdefault(parsed.matrix, PairKeys(parsed.path))
        if pair.path != parsed.path:
            raise invalid(f"holds '{key}', but other keys name the same module '{pair.path}'")
        which = parsed.part.lower()
        if getattr(pair, which) is not None:
            raise invalid(
                f"holds '{key}' a second time under another name, '{getattr(pair, which)}'"
            )
        setattr(pair, which, key)
    return keys


def _check_copy(
    file: WeightsFile, key: str, parsed: TensorKey, model: ModelShape, invalid: ErrorFactory
) -> None:
    """Require a whole weight in the file to be an unchanged copy of the base model's LM head.

    PEFT stores such a copy with an adapter of the LM head.
    """
    if parsed.matrix != (-1, LM_HEAD):
        what = "embeddings" if parsed.matrix is None else "a whole weight"
        raise invalid(
            f"holds '{key}', {what} besides the LoRA; if the tensor equals that of the base model,"
            f" {CONVERT} drops it"
        )
    expected = (model.vocabulary, model.hidden)
    if file.shapes[key] != expected or not file.equals(key, model.lm_head()):
        raise invalid(
            f"holds '{key}', which differs from the base model's own lm_head;"
            " train the LM head as a LoRA target"
        )


def check_pair(
    matrix: MatrixId,
    pair: PairKeys,
    file: WeightsFile,
    config: PeftConfig,
    model: ModelShape,
    invalid: ErrorFactory,
) -> tuple[int, float]:
    """Return the (rank, scale) of A and B of a matrix.

    Raises InvalidArgument if A or B is missing or does not fit the matrix, or if `config` does not
    target the module.
    """
    module, paths = pair.path, paths_of(matrix, model, pair.path)
    if pair.a is None or pair.b is None:
        missing = "A" if pair.a is None else "B"
        raise invalid(f"has no lora_{missing} for {module}")
    if not config.targets(paths):
        raise invalid(f"holds '{pair.a}', but adapter_config.json does not target {module}")
    d_out, d_in = model.shape_of(matrix)
    rank = config.rank_of(paths)
    shapes = file.shapes[pair.a], file.shapes[pair.b]
    if shapes != ((rank, d_in), (d_out, rank)):
        raise invalid(
            f"has A {shapes[0]} and B {shapes[1]} for {module};"
            f" with rank {rank} they must be ({rank}, {d_in}) and ({d_out}, {rank})"
        )
    return rank, config.scale_of(paths)


def make_reader(
    file: WeightsFile,
    keys: Mapping[MatrixId, PairKeys],
    ranks: Mapping[MatrixId, int],
    scales: Mapping[MatrixId, float],
) -> WeightsReader:
    """Return a reader of the matrices in `ranks`, which reads all A and then all B.

    keys: keys of A and B by matrix.
    scales: scale by matrix.

    `keys` and `scales` may contain other matrices, which are ignored.
    """
    layout = file.layout
    index = {key: number for number, key in enumerate(layout.keys)}
    both = [*(keys[matrix].a for matrix in ranks), *(keys[matrix].b for matrix in ranks)]
    order = [key for key in both if key is not None]
    return WeightsReader(
        layout,
        ranks,
        tuple(scales[matrix] for matrix in ranks),
        tuple(index[key] for key in order),
        tuple((file.shapes[key][0], file.shapes[key][1]) for key in order),
    ).shared()
