"""Premerge: one hot adapter is merged into the checkpoint, and all others become delta adapters.

This follows equations 1 to 5 of the paper "Plug-and-Play Multi-LoRA Support Layer for vLLM". The
fused weights are W + B_hot A_hot. Any other adapter is called cold. Its delta adapter, cold minus
hot, has B = [B_cold, -B_hot] and A = [A_cold; A_hot].
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from vlora.adapters.files import Adapter
from vlora.adapters.model_shape import LM_HEAD, ModelShape
from vlora.atmm.types import LoraPair
from vlora.atomic_file import new_folder
from vlora.errors import InvalidArgument
from vlora.ids import MatrixId
from vlora.model.decoder_config import DecoderConfig
from vlora.model.loader import find_weights
from vlora.model.weight_files import open_weights, weight_files
from vlora.offline.peft_folder import copy_head, write_adapter
from vlora.strict_json import load_object

# Name of the delta adapter that restores the base model, by subtracting the hot adapter. The
# gateway has the name "base" for the base model that it serves.
BASE_ADAPTER = "unmerged"
REPORT = "premerge.json"
DEFAULT_MAX_RANK = 64
# Keys that may name the adapter in a request log. The first one that is present is used.
NAME_KEYS = ("lora_name", "adapter", "model")
BASE_NAME = ""  # Name by which requests without an adapter are counted.
MAX_LINE_BYTES = 1 << 20


@dataclass(frozen=True)
class HotChoice:
    """The adapter to merge, or None, and LoRA's mean work per row before and after the merge."""

    hot: str | None
    work_before: float
    work_after: float


def lora_work(ranks: Mapping[MatrixId, int], shape: ModelShape) -> int:
    """Return an adapter's multiplications per row: the sum of rank · (d_in + d_out)."""
    return sum(rank * sum(shape.shape_of(matrix)) for matrix, rank in ranks.items())


def work_after_merge(requests: Mapping[str, int], work: Mapping[str, int], hot: str) -> float:
    """Return the mean work per row with `hot` merged into the base (see `choose_hot`)."""
    # Merging saves the hot adapter's own work, but adds it to every other request, because all
    # delta adapters must also subtract the hot one.
    others = (count * (work.get(name, 0) + work[hot]) for name, count in requests.items())
    return (sum(others) - requests.get(hot, 0) * 2 * work[hot]) / sum(requests.values())


def choose_hot(requests: Mapping[str, int], work: Mapping[str, int]) -> HotChoice:
    """Return the adapter whose merge makes the mean request cheapest.

    requests: number of requests by adapter. Those that are not in `work` are for the base.
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
    """Return the number of requests by adapter. Raises InvalidArgument with the file and line.

    Each line is a JSON object with one of NAME_KEYS, or just the adapter's name. A null or empty
    name stands for the base. Empty lines are skipped.
    """
    counts: Counter[str] = Counter()
    try:
        with path.open("rb") as opened:
            lines = iter(lambda: opened.readline(MAX_LINE_BYTES + 1), b"")
            for number, line in enumerate(lines, 1):
                if (name := _name_in(line, f"{path}: line {number}")) is not None:
                    counts[name] += 1
    except OSError as error:
        raise InvalidArgument(f"{path} cannot be read: {error.strerror}") from error
    return counts


def _name_in(line: bytes, where: str) -> str | None:
    if len(line) > MAX_LINE_BYTES:
        raise InvalidArgument(f"{where} has more than {MAX_LINE_BYTES} bytes")
    try:
        text = line.decode().strip()
    except UnicodeDecodeError:
        raise InvalidArgument(f"{where} is not UTF-8 text") from None
    if not text.startswith("{"):
        return text or None
    try:
        request = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{where} is not a JSON object: {error}") from error
    key = next((key for key in NAME_KEYS if key in request), None)
    if key is None:
        raise InvalidArgument(f"{where} names no adapter; use the key '{NAME_KEYS[0]}'")
    name = request[key]
    if name is not None and not isinstance(name, str):
        raise InvalidArgument(f"{where} has {key} = {name!r}, which is not a name")
    return str(name or BASE_NAME)


@dataclass
class Report:
    """Result of a premerge.

    hot: name of the hot adapter.
    matrices: number of fused matrices.
    rounding: largest rounding error of a fused weight, relative to the largest change of a weight
        by the hot adapter; 0 if the stored type represents every result exactly.
    max_rank: rank above which a delta adapter causes a warning.
    deltas: largest rank of each delta adapter that was written.
    failed: by name, the reason why an adapter was left out.
    """

    hot: str
    matrices: int = 0
    rounding: float = 0.0
    max_rank: int = DEFAULT_MAX_RANK
    deltas: dict[str, int] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def warnings(self) -> list[str]:
        """Sentences about delta adapters whose rank is above the maximum."""
        return [
            f"the delta adapter '{name}' has rank {rank}, above {self.max_rank}: a server may"
            f" refuse it, and it costs as much as '{name}' and the hot adapter together"
            for name, rank in self.deltas.items()
            if rank > self.max_rank
        ]

    def as_json(self) -> dict[str, Any]:
        """Return the content of `premerge.json`."""
        return {
            "hot": self.hot,
            "fused_matrices": self.matrices,
            "relative_rounding": self.rounding,
            "deltas": {name: {"rank": rank} for name, rank in self.deltas.items()},
            "failed": self.failed,
            "warnings": self.warnings,
        }


def premerged_adapter(model: Path, adapters: Path | None) -> str | None:
    """Return the name of the adapter that `premerge` merged into a checkpoint.

    It is None unless both folders are those that one call of `premerge` wrote.
    """
    report = model.parent / REPORT
    if adapters is None or adapters.parent != model.parent or not report.is_file():
        return None
    name = load_object(report.read_text(encoding="utf-8"), str(report)).get("hot")
    return name if isinstance(name, str) else None


def delta_pairs(
    cold: Mapping[MatrixId, LoraPair], hot: Mapping[MatrixId, LoraPair]
) -> dict[MatrixId, LoraPair]:
    """Return A and B of the delta adapter, cold minus hot, by matrix. B has the scale folded in."""
    pairs: dict[MatrixId, LoraPair] = {}
    for matrix in sorted(cold.keys() | hot.keys()):
        factors = [cold[matrix]] if matrix in cold else []
        if matrix in hot:
            factors.append(LoraPair(hot[matrix].a, -hot[matrix].b))
        pairs[matrix] = LoraPair(
            torch.cat([pair.a for pair in factors]), torch.cat([pair.b for pair in factors], dim=1)
        )
    return pairs


def no_change(hot: Mapping[MatrixId, LoraPair]) -> dict[MatrixId, LoraPair]:
    """Return an adapter of rank 1 that changes nothing, for requests to the hot adapter."""
    matrix, pair = next(iter(sorted(hot.items())))
    return {matrix: LoraPair(torch.zeros(1, pair.a.shape[1]), torch.zeros(pair.b.shape[0], 1))}


def check_hot(hot: Adapter, config: DecoderConfig) -> None:
    """Raise InvalidArgument if an adapter cannot be merged into this checkpoint."""
    _check_mergeable(hot)
    if config.tied and any(target == LM_HEAD for _, target in hot.pairs):
        raise InvalidArgument(
            f"adapter '{hot.info.name}' changes lm_head, which this checkpoint ties to its"
            " embeddings: merging it would change the embeddings too; choose another hot adapter"
        )


def _check_mergeable(adapter: Adapter) -> None:
    if adapter.info.vision_ranks:
        raise InvalidArgument(
            f"adapter '{adapter.info.name}' changes the vision tower or connector, which premerging"
            " leaves as they are"
        )
    if adapter.info.invocation:
        raise InvalidArgument(
            f"adapter '{adapter.info.name}' is an activated LoRA (alora_invocation_tokens): its"
            " tokens before the invocation need the unchanged base model"
        )


def fuse_checkpoint(
    source: Path,
    target: Path,
    config: DecoderConfig,
    hot: Mapping[MatrixId, LoraPair],
    exact: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[int, float]:
    """Write the checkpoint with the hot adapter merged into it to the new folder `target`.

    exact: whether to store fused weights in fp32 and declare fp32 in config.json. If False, they
        are rounded to the type in which the source stores them.
    progress: called with the name of each weights file before it is read.

    Returns the number of fused matrices, and `Report.rounding`.
    """
    names = config.names
    places = find_weights(source, config)
    pairs = {
        places[names.lm_head if target == LM_HEAD else names.matrix(layer, target)]: pair
        for (layer, target), pair in hot.items()
    }
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors", "*.bin"))
    error = change = 0.0
    if exact:
        _declare_float32(target / "config.json")
    for file in weight_files(source):
        progress(file.name)
        with open_weights(file) as opened:
            metadata = opened.metadata()
            tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
        for key in tensors.keys() & {key for path, key in pairs if path == file}:
            pair = pairs[file, key]
            delta = pair.b.double() @ pair.a.double()
            fused = tensors[key].double() + delta
            tensors[key] = fused.to(torch.float32 if exact else tensors[key].dtype)
            error = max(error, float((tensors[key].double() - fused).abs().max()))
            change = max(change, float(delta.abs().max()))
        save_file(tensors, target / file.name, metadata=metadata)
    return len(pairs), error / change if change else 0.0


def _declare_float32(path: Path) -> None:
    def declare(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {
            key: "float32" if key in ("dtype", "torch_dtype") else declare(part)
            for key, part in value.items()
        }

    config = declare(json.loads(path.read_text(encoding="utf-8")))
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def premerge(
    model: Path,
    config: DecoderConfig,
    shape: ModelShape,
    hot: tuple[Path, Adapter],
    cold: Mapping[str, Callable[[], tuple[Path, Adapter]]],
    out: Path,
    max_rank: int = DEFAULT_MAX_RANK,
    exact: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> Report:
    """Write `out/model`, `out/adapters` and `out/premerge.json`, or nothing; return a report.

    hot: folder and weights of the adapter to merge.
    cold: by name, a function that reads the folder and the weights of each other adapter. If it
        raises InvalidArgument, the adapter is reported, and the others are still written.
    exact: see `fuse_checkpoint`.
    progress: called with the name of each step.

    Raises InvalidArgument if `out` exists or the hot adapter cannot be merged.
    """
    folder, adapter = hot
    name = adapter.info.name
    check_hot(adapter, config)
    if BASE_ADAPTER in cold or name == BASE_ADAPTER:
        raise InvalidArgument(
            f"an adapter is named '{BASE_ADAPTER}', the name of the delta adapter that restores"
            " the base; rename its folder"
        )
    report = Report(name, max_rank=max_rank)
    with new_folder(out) as part:
        report.matrices, report.rounding = fuse_checkpoint(
            model, part / "model", config, adapter.pairs, exact, progress
        )
        base = str(out / "model")
        adapters = part / "adapters"
        write_adapter(adapters / name, no_change(adapter.pairs), shape, base)
        copy_head(folder, adapters / name)
        _write_deltas(adapters, adapter.pairs, cold, shape, base, report, progress)
        (part / REPORT).write_text(json.dumps(report.as_json(), indent=2) + "\n", encoding="utf-8")
    return report


def _write_deltas(
    folder: Path,
    hot: Mapping[MatrixId, LoraPair],
    cold: Mapping[str, Callable[[], tuple[Path, Adapter]]],
    shape: ModelShape,
    base: str,
    report: Report,
    progress: Callable[[str], None],
) -> None:
    def write(name: str, pairs: Mapping[MatrixId, LoraPair]) -> None:
        deltas = delta_pairs(pairs, hot)
        write_adapter(folder / name, deltas, shape, base)
        report.deltas[name] = max(pair.a.shape[0] for pair in deltas.values())

    write(BASE_ADAPTER, {})
    for name, read in cold.items():
        progress(name)
        try:
            source, weights = read()
            _check_mergeable(weights)
        except InvalidArgument as error:
            report.failed[name] = str(error)
            continue
        write(name, weights.pairs)
        copy_head(source, folder / name)
