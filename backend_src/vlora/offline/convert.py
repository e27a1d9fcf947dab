"""Conversion to a plain LoRA, for adapters that the server cannot load.

Pickles, copies of the base model's weights, PiSSA and OLoRA are converted exactly. The changes of
DoRA, and of other methods that PEFT can express as changes of weights, have full rank: A and B are
their truncated singular value decomposition, whose error is stated. The server's own loader then
checks the result.
"""

from __future__ import annotations

import math
import os
import pickle
import re
import resource
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import psutil
import torch
from safetensors.torch import save_file

from vlora.adapters.errors import ErrorFactory, open_file, read_json
from vlora.adapters.files import (
    CONFIG,
    MAX_ADAPTER_BYTES,
    OUTSIDE_LORA,
    PICKLED,
    WEIGHTS,
    AdapterDescription,
    describe_adapter,
    load_adapter,
    read_adapter,
)
from vlora.adapters.model_shape import LM_HEAD, ModelShape
from vlora.adapters.peft import KNOWN_CHANGES, UnknownKey, parse_key
from vlora.adapters.tensors import WeightsFile
from vlora.atmm.types import LoraPair
from vlora.atomic_file import new_folder
from vlora.errors import InvalidArgument, Unsupported, shown
from vlora.ids import VISION, MatrixId
from vlora.offline.base_weights import BaseWeights
from vlora.offline.peft_folder import copy_head, write_adapter, write_config
from vlora.weights.safetensors import FLOATS

ADAPTER = "default"
# Types of PEFT, besides LORA, that only change weights of linear layers and support a conversion.
# Others may load models, tokenizers or code that their config names, also from the network.
WEIGHT_CHANGES = (
    *("C3A", "DELORA", "FOURIERFT", "GRALORA", "LOHA", "LOKR", "MISS", "PSOFT", "RANDLORA"),
    *("SHIRA", "TINYLORA", "UNILORA", "VBLORA", "VERA", "WAVEFT"),
)
MAGNITUDE = "lora_magnitude_vector"
# Smaller side of the largest matrix that is decomposed fully, in about a second. Larger ones are
# decomposed by random projection, which takes as long as a few products.
EXACT_SIDE = 1024
# Additional dimensions and power iterations of the random projection. With these, the error is
# within 1 % of the minimum even if the singular values decrease slowly.
OVERSAMPLING, POWER_ITERATIONS = 16, 4
ROUNDING = 1e-5  # Singular values below this share of the largest one are rounding errors.
# Memory for reading a pickle, besides twice its size. torch compresses no tensors.
READER_BYTES = 256 * 1024**2
_GLOBAL = re.compile(r"GLOBAL (\S+)")  # The code that a pickle would run, in torch's error.


class PickledTensors:
    """Tensors of an `adapter_model.bin`, all in memory, with the methods of `WeightsFile`."""

    def __init__(self, path: Path, invalid: ErrorFactory) -> None:
        """Read the file. Raises InvalidArgument for anything but dense floats of a legal size."""
        with open_file(path, invalid) as file:
            size = os.fstat(file.fileno()).st_size
            self._tensors = _unpickle(file, size, invalid)
        self.shapes = {key: tuple(tensor.shape) for key, tensor in self._tensors.items()}
        # With strides of 0, a small file can declare a large tensor.
        declared = sum(4 * tensor.numel() for tensor in self._tensors.values())
        if declared > max(MAX_ADAPTER_BYTES, 4 * size):
            raise invalid(
                f"declares tensors of {declared} bytes in fp32; the limit is {MAX_ADAPTER_BYTES}"
            )

    def stored(self, key: str) -> torch.Tensor:
        return self._tensors[key]


Tensors = WeightsFile | PickledTensors


def open_tensors(folder: Path, invalid: ErrorFactory) -> tuple[Tensors, str]:
    """Return the folder's tensors, from safetensors or else a pickle, and their file's name."""
    if not (folder / WEIGHTS).exists() and (folder / PICKLED).exists():
        return PickledTensors(folder / PICKLED, invalid.in_file(PICKLED)), PICKLED
    return WeightsFile(folder / WEIGHTS, invalid.in_file(WEIGHTS)), WEIGHTS


@contextmanager
def _limited_memory(size: int) -> Iterator[None]:
    """Limit the memory that this process may allocate in a `with` block to `size` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    wanted = psutil.Process().memory_info().vms + size
    limits = [limit for limit in (soft, hard, wanted) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _unpickle(file: BinaryIO, size: int, invalid: ErrorFactory) -> dict[str, torch.Tensor]:
    # An archive may unpack to any size, and other readers may find other members in it than torch.
    memory = 2 * size + READER_BYTES
    try:
        # This restricted reader makes tensors and runs no code.
        with _limited_memory(memory), warnings.catch_warnings(action="ignore"):
            content: Any = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        found = _GLOBAL.search(str(error))
        what = f"the code '{found[1]}'" if found else "objects other than tensors"
        raise invalid(f"holds {what}, which is never run; only tensors are read") from None
    except Exception as error:  # The reader may raise any type if the file is not a pickle.
        if "weights_only" in str(error):  # torch advises to run the file.
            raise invalid("holds a program, which is never run; only tensors are read") from None
        reason = f"{type(error).__name__}: {error}"
        raise invalid(f"cannot be read as tensors in {memory} bytes of memory: {reason}") from error
    if not isinstance(content, Mapping):
        raise invalid(f"holds a {type(content).__name__}; it must hold tensors by key")
    for key, value in content.items():
        if not isinstance(key, str) or not isinstance(value, torch.Tensor):
            raise invalid(f"holds {key!r}, which is not a named tensor")
        if value.layout != torch.strided or value.dtype not in FLOATS.values():
            raise invalid(
                f"holds '{key}' as {value.dtype}, {value.layout}; it must be dense and one of"
                f" {', '.join(FLOATS)}"
            )
    return {key: value.detach() for key, value in content.items()}


@dataclass(frozen=True)
class LowRank:
    """A and B that approximate the change of a matrix.

    error, change: Frobenius norms of the relative error, and of the change.
    """

    pair: LoraPair
    error: float
    change: float

    @property
    def rank(self) -> int:
        return self.pair.a.shape[0]


def factorize(change: torch.Tensor, max_rank: int) -> LowRank:
    """Return A and B, of rank `max_rank` at most, whose product approximates a change.

    change: [d_out, d_in] fp32. A lower rank of it is that of the result, too.
    """
    norm = float(torch.linalg.norm(change))
    u, s, vt = _decompose(change, min(max_rank, *change.shape))
    rank = max(1, int((s > ROUNDING * s[0]).sum()))
    root = s[:rank].sqrt()
    pair = LoraPair((root[:, None] * vt[:rank]).contiguous(), (u[:, :rank] * root).contiguous())
    error = float(torch.linalg.norm(change - pair.b @ pair.a)) / norm if norm else 0.0
    return LowRank(pair, error, norm)


def sufficient_rank(change: torch.Tensor, max_error: float) -> int:
    """Return the smallest rank at which the error of `factorize` is at most `max_error`."""
    # All singular values are computed, which takes a minute for a matrix of 8192 rows.
    values = change if change.shape[0] <= change.shape[1] else change.T
    squares = torch.linalg.eigvalsh(values.double() @ values.double().T).flip(0).clamp(min=0)
    left = (squares.sum() - squares.cumsum(0)).clamp(min=0).sqrt()
    kept = torch.nonzero(left <= max_error * squares.sum().sqrt())
    return int(kept[0]) + 1 if len(kept) else len(squares)


def _decompose(change: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the truncated SVD: U [d_out, rank], S [rank] descending, and Vᵀ [rank, d_in]."""
    if min(change.shape) <= EXACT_SIDE:
        u, s, vt = torch.linalg.svd(change, full_matrices=False)
    else:
        wanted = min(rank + OVERSAMPLING, *change.shape)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            u, s, v = torch.svd_lowrank(change, wanted, POWER_ITERATIONS)
        vt = v.T
    return u[:, :rank], s[:rank], vt[:rank]


def dora_change(weight: torch.Tensor, pair: LoraPair, magnitude: torch.Tensor) -> torch.Tensor:
    """Return DoRA's change of a matrix, m (W + B A) / |W + B A| - W, with the norm of each row.

    weight: W [d_out, d_in] fp32.
    magnitude: m [d_out] fp32.
    """
    changed = weight + pair.b @ pair.a
    factor: torch.Tensor = magnitude / torch.linalg.norm(changed, dim=1)
    return factor[:, None] * changed - weight


def with_initial_change(pair: LoraPair, weight: torch.Tensor, kind: str, scale: float) -> LoraPair:
    """Return A and B that fit the unchanged base, for a LoRA whose initialization changed the base.

    pair: A and B for the changed base. The negative change becomes further rows and columns.
    weight: W [d_out, d_in] fp32 of the unchanged base.
    scale: scale of the LoRA, which is folded into the resulting B.
    """
    rank = pair.a.shape[0]
    if kind == "pissa":  # It subtracts the part of W with the largest singular values.
        u, s, vt = torch.linalg.svd(weight, full_matrices=False)
        initial = LoraPair(vt[:rank], u[:, :rank] * s[:rank])
    else:  # OLoRA subtracts the first columns of Q times the first rows of R, where W = Q R.
        q, r = torch.linalg.qr(weight)
        initial = LoraPair(r[:rank], scale * q[:, :rank])
    return LoraPair(torch.cat([pair.a, initial.a]), torch.cat([pair.b, -initial.b], dim=1))


@dataclass(frozen=True)
class ConversionLimits:
    """Maximum rank and relative error of each matrix's change, if a conversion is not exact."""

    rank: int = 64
    error: float = 0.05


@dataclass
class Conversion:
    """Result of a conversion.

    method: method of the source, such as "DoRA".
    dropped: keys of tensors that were left out because they equal the base model's weights.
    errors, changes: Frobenius norms of each matrix's relative error, and of its change.
    """

    method: str
    dropped: list[str] = field(default_factory=list)
    errors: dict[MatrixId, float] = field(default_factory=dict)
    changes: dict[MatrixId, float] = field(default_factory=dict)
    ranks: tuple[int, ...] = ()

    @property
    def error(self) -> float:
        """Frobenius norm of the errors of all matrices, relative to that of all changes."""
        left = math.hypot(*(self.errors[m] * self.changes[m] for m in self.errors))
        change = math.hypot(*self.changes.values())
        return left / change if change else 0.0

    @property
    def worst(self) -> float:
        """Largest relative error of any matrix."""
        return max(self.errors.values(), default=0.0)


@dataclass(frozen=True)
class _Source:
    """Adapter to convert, the checkpoint that it was trained for, and how to convert it."""

    config: Mapping[str, Any]
    tensors: Tensors
    shape: ModelShape
    base: BaseWeights
    invalid: ErrorFactory
    limits: ConversionLimits
    progress: Callable[[str], None]

    @property
    def method(self) -> str:
        if self.config.get("peft_type") != "LORA":
            return str(self.config.get("peft_type"))
        if self.config.get("use_dora"):
            return "DoRA"
        kind = self.config.get("init_lora_weights")
        return next((known for known in KNOWN_CHANGES if known == kind), "LoRA")

    def config_without(self, *keys: str) -> dict[str, Any]:
        return {key: value for key, value in self.config.items() if key not in keys}

    def is_copy(self, key: str) -> bool:
        """Return whether a tensor is a copy of one of the base model's weights."""
        try:
            parsed = parse_key(key, self.shape)
        except UnknownKey:
            return False
        if parsed.part != "weight":
            return False
        own, stored = self.base.matrix(parsed.matrix), self.tensors.stored(key)
        if own.shape != stored.shape or not torch.equal(own, stored.to(torch.float32)):
            remedy = "without it" if parsed.matrix is None else "it as a LoRA target"
            raise self.invalid(
                f"holds '{key}' {tuple(stored.shape)}, which differs from the base model's own"
                f" {tuple(own.shape)}: no LoRA can express it, train {remedy}"
            )
        return True

    def magnitudes(self, matrices: Iterable[MatrixId]) -> dict[MatrixId, torch.Tensor]:
        """Return DoRA's magnitudes, [d_out] fp32 by matrix, of exactly these matrices."""
        wanted, found = set(matrices), {}
        for key, declared in self.tensors.shapes.items():
            if MAGNITUDE not in key:
                continue
            try:
                matrix = parse_key(key, self.shape).matrix
            except UnknownKey as reason:
                raise self.invalid(f"holds '{key}', {reason}") from None
            if matrix is None or matrix not in wanted or matrix in found:
                raise self.invalid(
                    f"holds '{key}', whose module has no LoRA, or already has a magnitude"
                )
            d_out = self.shape.shape_of(matrix)[0]
            if declared != (d_out,):
                raise self.invalid(f"has '{key}' {declared}; it must be ({d_out},)")
            found[matrix] = self.tensors.stored(key).to(torch.float32)
            if not bool(torch.isfinite(found[matrix]).all()):
                raise self.invalid(f"has NaN or Inf in '{key}'")
        if missing := wanted - found.keys():
            raise self.invalid(f"has no {MAGNITUDE} for {name_of(min(missing))}")
        return found


def convert(
    source: Path,
    out: Path,
    shape: ModelShape,
    base: BaseWeights,
    limits: ConversionLimits,
    progress: Callable[[str], None] = lambda _: None,
) -> Conversion:
    """Write the adapter in `source` to the new folder `out` as a plain LoRA; return how.

    shape, base: shape and weights of the checkpoint that the adapter was trained for.
    progress: called with the name of each matrix before it is decomposed.

    Raises InvalidArgument, and writes nothing, if it cannot be converted within the limits.
    """
    name = source.absolute().name
    invalid = ErrorFactory(name)
    if not source.is_dir():
        raise InvalidArgument(f"no adapter folder at {source}")
    if (source / OUTSIDE_LORA).exists():
        raise invalid.in_file(OUTSIDE_LORA)("holds weights that no LoRA can express")
    config = read_json(source / CONFIG, invalid)
    kind = config.get("peft_type")
    if kind != "LORA" and kind not in WEIGHT_CHANGES:
        types = ", ".join(("LORA", *WEIGHT_CHANGES))
        raise invalid.in_file(CONFIG)(
            f"has peft_type {shown(kind)}, which is not converted; converted are {types}"
        )
    tensors, file = open_tensors(source, invalid)
    adapter = _Source(config, tensors, shape, base, invalid.in_file(file), limits, progress)
    result = Conversion(adapter.method)
    if config.get("alora_invocation_tokens") and adapter.method != "LoRA":
        raise invalid.in_file(CONFIG)(
            f"asks for {adapter.method} as an activated LoRA, which cannot be converted"
        )
    with new_folder(out) as part:
        copy_head(source, part)
        if kind == "LORA":
            pairs = _pairs_of_lora(adapter, part, _write_plain(adapter, part, name, result), result)
        else:
            pairs = _pairs_by_peft(adapter, result)
        if pairs:
            base_name = config.get("base_model_name_or_path")
            write_adapter(part, pairs, shape, base_name if isinstance(base_name, str) else "")
        result.ranks = load_adapter(name, part, shape).info.ranks
    return result


def _write_plain(source: _Source, part: Path, name: str, result: Conversion) -> AdapterDescription:
    """Write A and B unchanged to `part` as a plain LoRA, and return its checked description."""
    factors = {}
    for key in source.tensors.shapes:
        if source.is_copy(key):
            result.dropped.append(key)
        elif MAGNITUDE not in key:
            factors[key] = source.tensors.stored(key).clone().contiguous()
        elif source.method != "DoRA":
            raise source.invalid(f"holds '{key}', but adapter_config.json does not set use_dora")
    save_file(factors, part / WEIGHTS, metadata={"format": "pt"})
    plain = source.config_without("use_dora", "modules_to_save")
    if source.method in KNOWN_CHANGES:
        plain["init_lora_weights"] = True
    write_config(part / CONFIG, plain)
    return describe_adapter(name, part, source.shape)


def _pairs_of_lora(
    source: _Source, part: Path, plain: AdapterDescription, result: Conversion
) -> Mapping[MatrixId, LoraPair]:
    """Return new A and B for PEFT's type LORA; {} for a plain LoRA, which keeps its own.

    part: folder to which the A and B of the source were written.
    plain: description of that folder, which no longer names the source's method.
    """
    if source.method == "LoRA":
        return {}
    if plain.vision is not None:
        raise source.invalid(_vision_stays(source))
    pairs, reader = read_adapter(part, plain).pairs, plain.reader
    assert reader is not None
    if source.method == "DoRA":
        magnitudes = source.magnitudes(pairs)

        def change_of(matrix: MatrixId) -> torch.Tensor:
            return dora_change(source.base.matrix(matrix), pairs[matrix], magnitudes[matrix])

        return _factorize(source, pairs, change_of, result)
    if source.base.config.tied and (-1, LM_HEAD) in pairs:
        raise source.invalid(
            f"was initialised with '{source.method}', which changes the lm_head and so the"
            " embeddings that this checkpoint ties to it: no LoRA can express it"
        )
    return {
        matrix: with_initial_change(pair, source.base.matrix(matrix), source.method, scale)
        for (matrix, pair), scale in zip(pairs.items(), reader.scales, strict=True)
    }


def _pairs_by_peft(source: _Source, result: Conversion) -> Mapping[MatrixId, LoraPair]:
    kept = {}
    for key in source.tensors.shapes:
        if source.is_copy(key):
            result.dropped.append(key)
        else:
            kept[key] = source.tensors.stored(key)
    changes = _changes_of(source, kept)
    return _factorize(source, changes, lambda matrix: changes[matrix](), result)


def _changes_of(
    source: _Source, tensors: Mapping[str, torch.Tensor]
) -> dict[MatrixId, Callable[[], torch.Tensor]]:
    """Return functions that compute the change of each matrix by PEFT, [d_out, d_in] fp32.

    The whole model is loaded in fp32. Raises InvalidArgument if PEFT cannot express the adapter as
    changes of matrices of the language model, and Unsupported if PEFT is not installed.
    """
    try:
        from peft.tuners.tuners_utils import BaseTunerLayer
    except ImportError as error:
        raise Unsupported(
            f"converting this adapter needs {error.name}: pip install 'vlora[train]'"
        ) from error
    config, invalid = source.config_without("modules_to_save"), source.invalid
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise invalid(f"has NaN or Inf in '{name}'")
    if config.get("bias", "none") != "none":
        raise invalid(f"has bias {config['bias']!r}, which no LoRA can express")
    model = _adapted_model(config, tensors, source.base.folder, invalid)
    changes: dict[MatrixId, Callable[[], torch.Tensor]] = {}
    for path, module in model.named_modules():
        if not isinstance(module, BaseTunerLayer):
            continue
        if not module.supports_lora_conversion(ADAPTER):
            raise invalid(
                f"is of type {config.get('peft_type')!r}, which PEFT cannot convert to LoRA"
            )
        try:
            matrix = parse_key(f"{path}.weight", source.shape).matrix
        except UnknownKey as reason:
            raise invalid(f"changes '{path}', {reason}") from None
        if matrix is None:
            raise invalid(f"changes '{path}', the embeddings, which no LoRA can express")
        changes[matrix] = partial(_change, module)
    return changes


def _adapted_model(
    config: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    checkpoint: Path,
    invalid: ErrorFactory,
) -> Any:
    from peft import PeftConfig, get_peft_model, set_peft_model_state_dict

    try:
        parsed = PeftConfig.from_peft_type(**config)
        model = get_peft_model(_stock_model(checkpoint), parsed, ADAPTER)
        loaded = set_peft_model_state_dict(model, dict(tensors), ADAPTER)
    except Exception as error:  # PEFT raises any type for an invalid adapter.
        raise invalid(
            f"of type {config.get('peft_type')!r} cannot be loaded by PEFT:"
            f" {type(error).__name__}: {error}"
        ) from error
    missing = [key for key in loaded.missing_keys if model.base_model.prefix in key]
    if missing or loaded.unexpected_keys:
        strange = (missing or loaded.unexpected_keys)[0]
        raise invalid(
            f"{'lacks' if missing else 'holds'} '{strange}', which PEFT"
            f" {'expects' if missing else 'does not know'} for this checkpoint"
        )
    return model


def _change(module: Any) -> torch.Tensor:
    with torch.inference_mode():
        change: torch.Tensor = module.get_delta_weight(ADAPTER).to(torch.float32)
    return change


def _stock_model(checkpoint: Path) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    config = AutoConfig.from_pretrained(checkpoint, local_files_only=True, trust_remote_code=False)
    multimodal = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    model = AutoModelForImageTextToText if multimodal else AutoModelForCausalLM
    return model.from_pretrained(
        checkpoint, dtype=torch.float32, local_files_only=True, trust_remote_code=False
    )


def _factorize(
    source: _Source,
    matrices: Collection[MatrixId],
    change_of: Callable[[MatrixId], torch.Tensor],
    result: Conversion,
) -> Mapping[MatrixId, LoraPair]:
    """Return A and B for the changes of all matrices, and store their errors in `result`."""
    limits, pairs = source.limits, {}
    if any(layer == VISION for layer, _ in matrices):
        raise source.invalid(_vision_stays(source))
    for matrix in sorted(matrices):
        source.progress(name_of(matrix))
        change = change_of(matrix)
        if not bool(torch.isfinite(change).all()):
            raise source.invalid(f"changes {name_of(matrix)} to values that are not finite")
        low = factorize(change, limits.rank)
        pairs[matrix] = low.pair
        result.errors[matrix], result.changes[matrix] = low.error, low.change
    if not pairs:
        raise source.invalid("changes no matrix of the language model")
    worst = max(result.errors, key=lambda matrix: result.errors[matrix])
    if result.errors[worst] > limits.error:
        rank = sufficient_rank(change_of(worst), limits.error)
        raise source.invalid(
            f"cannot be converted within the error: rank {limits.rank} loses"
            f" {result.errors[worst]:.3g} of the change of {name_of(worst)} and {result.error:.3g}"
            f" of all changes; the limit is {limits.error:g}. This matrix needs --rank {rank};"
            " --max-error sets the limit"
        )
    return pairs


def _vision_stays(source: _Source) -> str:
    return (
        f"changes the vision tower or connector by {source.method}, which is converted for the"
        " language model only; merge it into a checkpoint with PEFT's merge_and_unload, or train"
        " it again with target_modules of the language model"
    )


def name_of(matrix: MatrixId) -> str:
    """Return the name of a matrix for messages."""
    layer, target = matrix
    return target if layer < 0 else f"layers.{layer}.{target}"
