"""Keys of an adapter's tensors, as PEFT writes them.

A key contains the path of a module in the model that was trained, and the role of the tensor. The
layouts of transformers (`LAYOUTS`) have different paths for the same matrix. This module maps all
of them to one matrix id.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from vlora.errors import nearest
from vlora.ids import VISION, MatrixId
from vlora.lora.model_shape import HEADS, LAYOUTS, LM_HEAD, ModelShape, vision_path
from vlora.lora.slab import TARGETS

Part = Literal["A", "B", "magnitude", "weight"]
"""Role of a tensor: a factor of the LoRA, the magnitudes of DoRA, or a whole weight."""

EMBEDDINGS = "embed_tokens"
_PATH = re.compile(
    r"(?:base_model\.model\.)?(?P<path>.+?)"
    r"(?:\.lora_(?P<factor>[AB])(?:\.default)?\.weight"
    r"|\.lora_(?P<magnitude>magnitude_vector)(?:\.default)?(?:\.weight)?"
    r"|(?:\.base_layer|\.modules_to_save(?:\.default)?)?\.weight)"
)
_MODULE = re.compile(
    r"(?P<prefix>.*?)layers\.(?P<layer>0|[1-9][0-9]{0,4})\.(?:self_attn|mlp)\.(?P<target>\w+)"
)
_OWN_MODULE = re.compile(r"(?:transformer\.)?h\.(?P<layer>0|[1-9][0-9]{0,4})\.(?P<module>[\w.]+)")
_VISION = re.compile(r"vision_tower|visual|vision_model|multi_modal_projector|merger|connector")

CONVERT = "`vlora adapters convert FOLDER OUT --model CHECKPOINT`"
"""Command that error messages recommend."""


@dataclass(frozen=True)
class TensorKey:
    """Meaning of one key.

    path: path of the module, as the file spells it.
    matrix: matrix that the tensor belongs to; None for the input embeddings.
    part: role of the tensor.
    """

    path: str
    matrix: MatrixId | None
    part: Part


class UnknownKey(ValueError):
    """Raised for a key that belongs to no tensor of a LoRA on this model. The message says why."""


def parse_key(key: str, model: ModelShape) -> TensorKey:
    """Return the meaning of a key.

    Raises UnknownKey if the model has no such tensor.
    """
    match = _PATH.fullmatch(key)
    if match is None or "lora_" in match["path"]:
        raise UnknownKey(_reason(key))
    path = match["path"]
    part: Part = "A" if match["factor"] == "A" else "B" if match["factor"] else "weight"
    if match["magnitude"]:
        part = "magnitude"
    if path in HEADS:
        return TensorKey(path, (-1, LM_HEAD), part)
    if path.removesuffix(EMBEDDINGS) in LAYOUTS and path.endswith(EMBEDDINGS) and part == "weight":
        return TensorKey(path, None, part)
    in_tower = vision_path(path)
    if in_tower is not None:
        if in_tower not in model.vision():
            raise UnknownKey(_reason(key))
        return TensorKey(path, (VISION, in_tower), part)
    own = _OWN_MODULE.fullmatch(path)
    if own is not None and own["module"] in model.modules:
        matrix = (int(own["layer"]), model.modules[own["module"]])
        if matrix not in model.matrices:
            raise UnknownKey(_reason_no_matrix(matrix, model))
        return TensorKey(path, matrix, part)
    module = _MODULE.fullmatch(path)
    if module is None or module["prefix"] not in LAYOUTS or model.modules:
        raise UnknownKey(_reason(key, module["prefix"] if module else None))
    matrix = (int(module["layer"]), module["target"])
    if matrix not in model.matrices:
        raise UnknownKey(_reason_no_matrix(matrix, model))
    return TensorKey(path, matrix, part)


def _reason(key: str, prefix: str | None = None) -> str:
    """Return the reason why a key is unknown, for the error message.

    prefix: text before `layers`, if the key otherwise has the form of a LoRA weight.
    """
    if _VISION.search(key):
        return "which is not a linear layer of this model's vision tower or connector"
    if "lora_embedding" in key:
        return "trained embeddings, which are not supported"
    if prefix is not None:
        known = ", ".join(f"'{layout}layers'" for layout in LAYOUTS)
        return f"whose layers follow '{prefix}', which is not a known layout; known: {known}"
    return "which is not a LoRA weight of the language model"


def _reason_no_matrix(matrix: MatrixId, model: ModelShape) -> str:
    target = matrix[1]
    if target not in {*model.shapes, *model.modules.values()}:
        hint = nearest(target, TARGETS) or ";"
        return f"which this model does not have{hint} targets are {', '.join(model.shapes)}"
    return f"which this model does not have: its layers are 0 to {model.layers - 1}"
