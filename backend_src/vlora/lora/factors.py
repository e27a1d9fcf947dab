"""LoRA factors A and B of an adapter's matrices: assignment of the file's tensors to them, and
checks that they fit the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vlora.ids import MatrixId
from vlora.lora.keys import CONVERT, TensorKey, UnknownKey, parse_key
from vlora.lora.model_shape import LM_HEAD, ModelShape, paths_of
from vlora.lora.peft_config import ErrorFactory, PeftConfig
from vlora.lora.weights_file import WeightsFile
from vlora.lora.weights_reader import WeightsReader


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
