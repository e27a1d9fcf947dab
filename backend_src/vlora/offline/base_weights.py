"""Reader of individual weights of a checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch

from vlora.adapters.model_shape import LM_HEAD, vision_path
from vlora.errors import InvalidArgument
from vlora.ids import VISION, MatrixId
from vlora.model.decoder_config import DecoderConfig
from vlora.model.loader import find_weights, read_weight
from vlora.model.weight_files import open_weights, weight_files


class BaseWeights:
    """Weights of a checkpoint folder, each of which is read when it is requested."""

    def __init__(self, folder: Path, config: DecoderConfig) -> None:
        """Find the language model's weights. Raise InvalidArgument if one is missing."""
        self.folder = folder
        self.config = config
        self._places = find_weights(folder, config)

    def matrix(self, matrix: MatrixId | None) -> torch.Tensor:
        """Return a matrix, or the input embeddings for None, [d_out, d_in] fp32."""
        if matrix is not None and matrix[0] == VISION:
            return self._of_vision(matrix[1])
        names = self.config.names
        if matrix is None or (matrix[1] == LM_HEAD and self.config.tied):
            name = names.embedding
        else:
            name = names.lm_head if matrix[1] == LM_HEAD else names.matrix(*matrix)
        return read_weight(*self._places[name])

    def _of_vision(self, path: str) -> torch.Tensor:
        for file in weight_files(self.folder):
            for key in open_weights(file).keys():  # noqa: SIM118
                if key.endswith(".weight") and vision_path(key.removesuffix(".weight")) == path:
                    return read_weight(file, key)
        raise InvalidArgument(f"{self.folder} has no weight of '{path}'")
