"""The check of a system's tokens by its own weights, dequantized, in float32 and in torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

from benchmarks.peers.process import Answer, Prompt


class Reference:
    """A Llama of given weights with PEFT's adapters.

    llama: folder that `checkpoints.llama_folder` returned.
    weights: file of dequantized weights, or None for those of the checkpoint.
    """

    def __init__(self, llama: Path, weights: Path | None, adapters: Sequence[str]) -> None:
        from peft import PeftModel
        from transformers import LlamaForCausalLM

        model = LlamaForCausalLM.from_pretrained(llama / "model", dtype=torch.float32)
        if weights is not None:
            found = model.load_state_dict(load_file(weights), strict=False)
            assert not found.unexpected_keys, found.unexpected_keys
        paths = {name: llama / "adapters" / name for name in adapters}
        first, *others = adapters
        self._model = PeftModel.from_pretrained(model, paths[first], adapter_name=first)
        for name in others:
            self._model.load_adapter(paths[name], adapter_name=name)
        self._model.eval()

    @torch.inference_mode()
    def check(self, prompts: Sequence[Prompt], answers: Sequence[Answer]) -> tuple[float, float]:
        """Return the share of tokens that are the most probable ones after the tokens before, and
        the largest distance of a token's logit from the best one, in standard deviations of all.
        """
        hits: list[torch.Tensor] = []
        gaps: list[torch.Tensor] = []
        for prompt, answer in zip(prompts, answers, strict=True):
            ids = torch.tensor([prompt.tokens + answer.tokens])
            if prompt.adapter is None:
                with self._model.disable_adapter():
                    logits = self._model(input_ids=ids).logits
            else:
                self._model.set_adapter(prompt.adapter)
                logits = self._model(input_ids=ids).logits
            logits = logits[0, len(prompt.tokens) - 1 : -1]
            chosen = logits.gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
            best = logits.amax(dim=1)
            hits.append(chosen == best)
            gaps.append((best - chosen) / logits.std(dim=1))
        return float(torch.cat(hits).float().mean()), float(torch.cat(gaps).max())
