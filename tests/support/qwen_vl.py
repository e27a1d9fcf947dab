"""Qwen-VL of the first generation: a small checkpoint as published, and a slow reference.

transformers has no such model. The reference follows the published architecture with plain tensor
operations, one head, layer and image at a time.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import regex
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

HIDDEN, HEADS, LAYERS, MLP, QUERIES, WIDTH = 256, 8, 2, 96, 16, 32
WORDS = (b"th", b"the", b" a", b" wh", b"in", b" is", b" what", b"er", b"wer", b" the", b" i")
SPECIAL = 217
RANKS = 256 + len(WORDS)
VISUAL = {
    "image_size": 56,
    "patch_size": 14,
    "width": WIDTH,
    "layers": 2,
    "heads": 2,
    "mlp_ratio": 2.5,
    "n_queries": QUERIES,
    "output_dim": HIDDEN,
    "image_start_id": RANKS + 214,
}
IMAGE_PAD = int(VISUAL["image_start_id"]) + 2
"""Token of the prompt that stands for one query of an image."""
CONFIG = {
    "model_type": "qwen",
    "architectures": ["QWenLMHeadModel"],
    "auto_map": {"AutoConfig": "configuration_qwen.QWenConfig"},
    "vocab_size": RANKS + SPECIAL + 12,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "kv_channels": HIDDEN // HEADS,
    "intermediate_size": 2 * MLP,
    "layer_norm_epsilon": 1e-6,
    "max_position_embeddings": 2048,
    "rotary_emb_base": 10000,
    "rotary_pct": 1.0,
    "seq_length": 512,
    "no_bias": True,
    "use_dynamic_ntk": True,
    "use_logn_attn": True,
    "tie_word_embeddings": False,
    "visual": VISUAL,
}
PATTERN = regex.compile(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def make_qwen_vl(folder: Path) -> Path:
    """Write a checkpoint with random weights. Return its folder."""
    torch.manual_seed(9)
    mlp = int(WIDTH * VISUAL["mlp_ratio"])
    shapes: dict[str, tuple[int, ...]] = {
        "transformer.wte.weight": (CONFIG["vocab_size"], HIDDEN),
        "transformer.ln_f.weight": (HIDDEN,),
        "lm_head.weight": (CONFIG["vocab_size"], HIDDEN),
    }
    for n in range(LAYERS):
        shapes |= {
            f"transformer.h.{n}.{name}.weight": shape
            for name, shape in {
                "ln_1": (HIDDEN,),
                "ln_2": (HIDDEN,),
                "attn.c_attn": (3 * HIDDEN, HIDDEN),
                "attn.c_proj": (HIDDEN, HIDDEN),
                "mlp.w1": (MLP, HIDDEN),
                "mlp.w2": (MLP, HIDDEN),
                "mlp.c_proj": (HIDDEN, MLP),
            }.items()
        }
        shapes[f"transformer.h.{n}.attn.c_attn.bias"] = (3 * HIDDEN,)
    tower: dict[str, tuple[int, ...]] = {
        "conv1.weight": (WIDTH, 3, 14, 14),
        "positional_embedding": (256, WIDTH),
        "proj": (HIDDEN, HIDDEN),
        "attn_pool.pos_embed": (QUERIES, HIDDEN),
        "attn_pool.query": (QUERIES, HIDDEN),
        "attn_pool.kv_proj.weight": (HIDDEN, WIDTH),
        "attn_pool.attn.in_proj_weight": (3 * HIDDEN, HIDDEN),
        "attn_pool.attn.in_proj_bias": (3 * HIDDEN,),
        "attn_pool.attn.out_proj.weight": (HIDDEN, HIDDEN),
        "attn_pool.attn.out_proj.bias": (HIDDEN,),
    }
    norms = {
        "ln_pre": WIDTH,
        "ln_post": HIDDEN,
        "attn_pool.ln_q": HIDDEN,
        "attn_pool.ln_kv": HIDDEN,
    }
    linears = {"attn.in_proj": (3 * WIDTH, WIDTH), "attn.out_proj": (WIDTH, WIDTH)}
    linears |= {"mlp.c_fc": (mlp, WIDTH), "mlp.c_proj": (WIDTH, mlp)}
    for n in range(int(VISUAL["layers"])):
        block = f"transformer.resblocks.{n}."
        norms |= {block + "ln_1": WIDTH, block + "ln_2": WIDTH}
        tower |= {f"{block}{name}.weight": shape for name, shape in linears.items()}
        tower |= {f"{block}{name}.bias": shape[:1] for name, shape in linears.items()}
    for name, width in norms.items():
        tower |= {f"{name}.weight": (width,), f"{name}.bias": (width,)}
    shapes |= {f"transformer.visual.{name}": shape for name, shape in tower.items()}
    tensors = {}
    for name, shape in shapes.items():
        is_norm = "ln_" in name and name.endswith("weight")
        spread = 0.3 if len(shape) == 1 else 1.5 / math.sqrt(math.prod(shape[1:]))
        tensors[name] = torch.randn(shape) * spread + is_norm
    tensors["lm_head.weight"][RANKS:] = 0.0  # Special tokens would not be text.
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    generation = {"chat_format": "chatml", "eos_token_id": RANKS, "pad_token_id": RANKS}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    tokens = [bytes([value]) for value in range(256)] + list(WORDS)
    lines = (base64.b64encode(token) + b" %d" % rank for rank, token in enumerate(tokens))
    (folder / "qwen.tiktoken").write_bytes(b"\n".join(lines) + b"\n")
    return folder


def slow_tokens(text: str) -> list[int]:
    """Return the tokens of a text without special tokens: pairs with the lowest rank join first."""
    ranks = {bytes([value]): value for value in range(256)}
    ranks |= {token: 256 + rank for rank, token in enumerate(WORDS)}
    found: list[int] = []
    for word in PATTERN.findall(text):
        data = word.encode()
        parts = [data[i : i + 1] for i in range(len(data))]
        while len(parts) > 1:
            joined = [ranks.get(a + b, 1 << 30) for a, b in pairwise(parts)]
            best = min(range(len(joined)), key=joined.__getitem__)
            if joined[best] == 1 << 30:
                break
            parts[best : best + 2] = [parts[best] + parts[best + 1]]
        found += [ranks[part] for part in parts]
    return found


TARGETS = {
    "attn.c_attn": (3 * HIDDEN, HIDDEN),
    "attn.c_proj": (HIDDEN, HIDDEN),
    "mlp.w1": (MLP, HIDDEN),
    "mlp.w2": (MLP, HIDDEN),
}
"""Shapes of the modules of a decoder layer that adapters of the tests change."""
TOWER = {
    "transformer.resblocks.1.attn.in_proj": (3 * WIDTH, WIDTH),
    "transformer.resblocks.0.mlp.c_fc": (int(WIDTH * VISUAL["mlp_ratio"]), WIDTH),
}
CONNECTOR = {"attn_pool.kv_proj": (HIDDEN, WIDTH), "attn_pool.attn.out_proj": (HIDDEN, HIDDEN)}
"""Shapes of the modules of the tower and of its last layer that adapters of the tests change."""


def make_adapter(folder: Path, seed: int, targets: Collection[str], **options: Any) -> None:
    """Write an adapter as PEFT saves it, of modules such as `attn.c_attn` or those of TOWER.

    options: further keys of its config.
    """
    torch.manual_seed(seed)
    modules = {}
    for name in targets:
        if name in TARGETS:
            modules |= {f"h.{layer}.{name}": TARGETS[name] for layer in range(LAYERS)}
        else:
            modules[f"visual.{name}"] = (TOWER | CONNECTOR)[name]
    tensors = {}
    for path, (rows, columns) in modules.items():
        spread = 0.2 if path.startswith("visual.") else 0.1
        prefix = f"base_model.model.transformer.{path}.lora_"
        tensors[f"{prefix}A.weight"] = torch.randn(4, columns) * spread
        tensors[f"{prefix}B.weight"] = torch.randn(rows, 4) * spread
    names = [name if name == "attn.c_proj" else name.rpartition(".")[2] for name in targets]
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": names} | options
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")


class Reference:
    """Slow model of a checkpoint and its adapters."""

    def __init__(self, folder: Path, adapters: Mapping[str, Path]) -> None:
        base = load_file(folder / "model.safetensors")
        self._weights: dict[str | None, dict[str, torch.Tensor]] = {None: base}
        for name, path in adapters.items():
            factors = load_file(path / "adapter_model.safetensors")
            config = json.loads((path / "adapter_config.json").read_text())
            scale = config["lora_alpha"] / config["r"]
            if config.get("use_rslora"):
                scale = config["lora_alpha"] / math.sqrt(config["r"])
            changed = dict(base)
            for key, a in factors.items():
                if key.endswith("lora_A.weight"):
                    module = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                    b = factors[key.replace("lora_A", "lora_B")]
                    changed[f"{module}.weight"] = base[f"{module}.weight"] + scale * b @ a
            self._weights[name] = changed

    def greedy(
        self, ids: Sequence[int], images: Sequence[Any], adapter: str | None, count: int
    ) -> list[int]:
        """Return the first tokens of the greedy answer to a prompt.

        images: pixels of each image, uint8 [height, width, 3].
        """
        features = [self.features(rgb) for rgb in images]
        answer: list[int] = []
        for _ in range(count):
            answer.append(int(self.logits([*ids, *answer], features, adapter)[-1].argmax()))
        return answer

    @torch.inference_mode()
    def features(self, rgb: Any, adapter: str | None = None) -> torch.Tensor:
        """Return the features of one image, [queries, hidden]."""
        w = {
            key.removeprefix("transformer.visual."): value
            for key, value in self._weights[adapter].items()
            if key.startswith("transformer.visual.")
        }
        picture = Image.fromarray(rgb).resize((56, 56), Image.Resampling.BICUBIC)
        mean = torch.tensor([0.48145466, 0.4578275, 0.40821073])
        std = torch.tensor([0.26862954, 0.26130258, 0.27577711])
        pixels = (torch.from_numpy(np.asarray(picture).copy()).float() / 255 - mean) / std
        kernel = w["conv1.weight"].permute(0, 2, 3, 1).flatten(1)
        corners = [(top, left) for top in range(0, 56, 14) for left in range(0, 56, 14)]
        x = torch.stack([kernel @ pixels[t : t + 14, p : p + 14].flatten() for t, p in corners])
        x = _norm(x + _resized(w["positional_embedding"], 4), w, "ln_pre")
        for n in range(int(VISUAL["layers"])):
            block = f"transformer.resblocks.{n}."
            projected = _linear(_norm(x, w, block + "ln_1"), w, block + "attn.in_proj")
            size = WIDTH // int(VISUAL["heads"])
            heads = [
                _attend(*(one[:, i * size : (i + 1) * size] for i in range(3)))
                for one in projected.split(3 * size, dim=1)
            ]
            x = x + _linear(torch.cat(heads, 1), w, block + "attn.out_proj")
            inner = _linear(_norm(x, w, block + "ln_2"), w, block + "mlp.c_fc")
            gelu = inner * 0.5 * (1 + torch.erf(inner / math.sqrt(2)))
            x = x + _linear(gelu, w, block + "mlp.c_proj")
        values = _norm(x @ w["attn_pool.kv_proj.weight"].T, w, "attn_pool.ln_kv")
        keys = values + _resized(w["attn_pool.pos_embed"], 4)
        queries = _norm(w["attn_pool.query"], w, "attn_pool.ln_q") + w["attn_pool.pos_embed"]
        heads = []
        for part in range(HIDDEN // 128):
            rows = [slice(at + 128 * part, at + 128 * part + 128) for at in (0, HIDDEN, 2 * HIDDEN)]
            inputs = zip((queries, keys, values), rows, strict=True)
            matrix, bias = w["attn_pool.attn.in_proj_weight"], w["attn_pool.attn.in_proj_bias"]
            heads.append(_attend(*(one @ matrix[r].T + bias[r] for one, r in inputs)))
        pooled = _linear(torch.cat(heads, 1), w, "attn_pool.attn.out_proj")
        return _norm(pooled, w, "ln_post") @ w["proj"]

    @torch.inference_mode()
    def logits(
        self,
        ids: Sequence[int],
        features: Sequence[torch.Tensor],
        adapter: str | None,
        start: int = 0,
    ) -> torch.Tensor:
        """Return the logits after each token, [len(ids), vocabulary].

        start: number of the first token on which the adapter acts.
        """
        w, base = self._weights[adapter], self._weights[None]

        def product(x: torch.Tensor, name: str) -> torch.Tensor:
            weights = base[f"{name}.weight"], w[f"{name}.weight"]
            return torch.cat([x[:start] @ weights[0].T, x[start:] @ weights[1].T])

        x = w["transformer.wte.weight"][list(ids)].clone()
        places = [i for i, token in enumerate(ids) if token == IMAGE_PAD]
        if features:
            x[places] = torch.cat(list(features))
        size = HIDDEN // HEADS
        angles = torch.arange(len(ids))[:, None] / 10000 ** (torch.arange(0, size, 2) / size)
        turn = torch.polar(torch.ones_like(angles), angles)
        future = torch.full((len(ids), len(ids)), -math.inf).triu(1)
        for n in range(LAYERS):
            layer = f"transformer.h.{n}."
            normed = _rms(x, w[layer + "ln_1.weight"])
            projected = product(normed, layer + "attn.c_attn") + w[layer + "attn.c_attn.bias"]
            heads = []
            for head in range(HEADS):
                columns = slice(head * size, (head + 1) * size)
                q, k, v = (one[:, columns] for one in projected.split(HIDDEN, dim=1))
                heads.append(_attend(_rotate(q, turn), _rotate(k, turn), v, future))
            x = x + product(torch.cat(heads, 1), layer + "attn.c_proj")
            normed = _rms(x, w[layer + "ln_2.weight"])
            gate = product(normed, layer + "mlp.w2")
            up = product(normed, layer + "mlp.w1")
            x = x + product(up * gate * torch.sigmoid(gate), layer + "mlp.c_proj")
        return _rms(x, w["transformer.ln_f.weight"]) @ w["lm_head.weight"].T


def _rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * (x.pow(2).mean(1, keepdim=True) + 1e-6).rsqrt() * weight


def _norm(x: torch.Tensor, weights: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    spread = x.var(1, keepdim=True, correction=0) + 1e-6
    normed = (x - x.mean(1, keepdim=True)) * spread.rsqrt()
    return normed * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def _linear(x: torch.Tensor, weights: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | float = 0.0
) -> torch.Tensor:
    return torch.softmax(q @ k.T / math.sqrt(q.shape[1]) + mask, dim=1) @ v


def _rotate(x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    """Rotate element i with element i + half."""
    first, second = x.chunk(2, dim=1)
    turned = torch.complex(first, second) * turn
    return torch.cat([turned.real, turned.imag], dim=1)


def _resized(positions: torch.Tensor, side: int) -> torch.Tensor:
    """Return positions of a square, interpolated to another side, [side * side, width]."""
    old = math.isqrt(len(positions))
    if old == side:
        return positions
    grid = positions.view(old, old, -1).permute(2, 0, 1)[None]
    return torch.nn.functional.interpolate(grid, (side, side), mode="bicubic")[0].flatten(1).T
