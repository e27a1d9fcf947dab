"""Writer of adapter folders in the form in which PEFT saves them.

The scale is folded into B, so alpha is set to the rank of every matrix, which makes PEFT's scale 1.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from vlora.adapters.files import CONFIG, WEIGHTS
from vlora.adapters.model_shape import ModelShape, paths_of
from vlora.atmm.types import LoraPair
from vlora.ids import MatrixId

HEAD_FILES = ("vlora.json", "head.safetensors")


def write_adapter(
    folder: Path, pairs: Mapping[MatrixId, LoraPair], shape: ModelShape, base: str
) -> None:
    """Write `adapter_config.json` and the weights of one adapter into a folder.

    pairs: A [rank, d_in] and B [d_out, rank] of each matrix, with the scale folded into B.
    base: value of `base_model_name_or_path`.

    Raises ValueError if `pairs` is empty.
    """
    if not pairs:
        raise ValueError("an adapter needs at least one matrix")
    folder.mkdir(parents=True, exist_ok=True)
    # The last of the paths is the one in the served model.
    paths = {matrix: paths_of(matrix, shape, "")[-1] for matrix in pairs}
    ranks = {paths[matrix]: pair.a.shape[0] for matrix, pair in pairs.items()}
    (common_rank, _), *_ = Counter(ranks.values()).most_common()
    other_ranks = {path: rank for path, rank in ranks.items() if rank != common_rank}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "bias": "none",
        "r": common_rank,
        "lora_alpha": common_rank,
        "lora_dropout": 0.0,
        "use_rslora": False,
        "rank_pattern": other_ranks,
        "alpha_pattern": other_ranks,
        # Whole paths, because a vision tower may have modules with the same names.
        "target_modules": sorted(paths.values()),
    }
    write_config(folder / CONFIG, config)
    tensors = {}
    for matrix, pair in pairs.items():
        prefix = f"base_model.model.{paths[matrix]}"
        tensors[f"{prefix}.lora_A.weight"] = pair.a.float().contiguous()
        tensors[f"{prefix}.lora_B.weight"] = pair.b.float().contiguous()
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def rename_base(folder: Path, base: str) -> None:
    """Replace the name of the base model, a path on the training machine, in the config."""
    path = folder / CONFIG
    config = json.loads(path.read_text(encoding="utf-8"))
    config["base_model_name_or_path"] = base
    write_config(path, config)


def write_config(path: Path, config: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def copy_head(source: Path, target: Path) -> None:
    """Copy `vlora.json` and the vision task head of an adapter folder, if they exist."""
    for name in HEAD_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
