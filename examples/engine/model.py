"""A decoder-only transformer in the Llama manner. It knows no cache: `attend` does that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

# attend(layer, q, k, v): q (batch, queries, heads, head_dim), k and v of these very tokens, with
# kv_heads; what each query gets from the keys it may see, of the shape of q.
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Config:
    """The shape of a model; every second layer attends to the last ``window`` tokens alone."""

    vocab: int = 61
    dim: int = 32
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    hidden: int = 64
    window: int = 24
    late: float = 1.0  # scale of what the second half of the layers adds

    def windowed(self, layer: int) -> bool:
        """Whether ``layer`` has a sliding window."""
        return layer % 2 == 1


TINY = Config(late=0.25)  # so that a draft of the first half is right about half the time
LLAMA_1B = Config(
    vocab=32768, dim=2048, layers=16, heads=32, kv_heads=8, head_dim=64, hidden=8192, window=512
)


class Layer(NamedTuple):
    """Weights, each ``(inputs, outputs)``."""

    attention_norm: Tensor
    qkv: Tensor
    out: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


class Model:
    """Seeded random weights and the forward pass."""

    def __init__(self, config: Config, seed: int = 0, dtype: Any = None, device: Any = "cpu"):
        self.config, self.dtype, self.device = config, dtype or torch.float64, torch.device(device)
        random = torch.Generator(self.device).manual_seed(seed)

        def weights(rows: int, columns: int, scale: float = 1.0) -> Tensor:
            made = torch.randn(rows, columns, generator=random, device=self.device)
            return (made * (scale * rows**-0.5)).to(self.dtype)

        def norm() -> Tensor:
            return (1 + 0.1 * weights(1, config.dim)[0]).to(self.dtype)

        width = config.heads * config.head_dim
        both = 2 * config.kv_heads * config.head_dim
        self.embedding = weights(config.vocab, config.dim, config.vocab**0.5)
        self.layers = []
        for index in range(config.layers):
            scale = config.late if 2 * index >= config.layers else 1.0
            self.layers.append(
                Layer(
                    norm(),
                    weights(config.dim, width + both),
                    weights(width, config.dim, scale),
                    norm(),
                    weights(config.dim, 2 * config.hidden),
                    weights(config.hidden, config.dim, scale),
                )
            )
        self.norm, self.head = norm(), weights(config.dim, config.vocab)

    def draft(self) -> Model:
        """A small draft model: the first half of the layers, the same embedding and head."""
        small = object.__new__(Model)
        small.__dict__.update(self.__dict__)
        small.config = replace(self.config, layers=self.config.layers // 2)
        small.layers = self.layers[: small.config.layers]
        return small

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states ``(batch, queries, dim)`` of tokens at these positions, both
        ``(batch, queries)``.
        """
        config = self.config
        cos, sin = self._angles(positions)
        x = self.embedding[tokens]
        sizes = [config.heads * config.head_dim] + [config.kv_heads * config.head_dim] * 2
        for index, layer in enumerate(self.layers):
            mixed = self._normed(x, layer.attention_norm) @ layer.qkv
            q, k, v = (
                part.unflatten(-1, (-1, config.head_dim)) for part in mixed.split(sizes, dim=-1)
            )
            seen = attend(index, _rotated(q, cos, sin), _rotated(k, cos, sin), v)
            x = x + seen.flatten(-2) @ layer.out
            gate, up = (self._normed(x, layer.mlp_norm) @ layer.gate_up).chunk(2, dim=-1)
            x = x + (functional.silu(gate) * up) @ layer.down
        return self._normed(x, self.norm)

    def logits(self, hidden: Tensor) -> Tensor:
        """``(..., vocab)`` of hidden states ``(..., dim)``."""
        return hidden @ self.head

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, weight.shape, weight, 1e-5)

    def _angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        half = self.config.head_dim // 2
        powers = torch.arange(half, device=self.device, dtype=wide) / half
        angles = positions.to(wide)[..., None, None] * 10_000.0**-powers
        return angles.cos().to(self.dtype), angles.sin().to(self.dtype)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Alone:
    """The reference: one request by itself, its keys and values one behind the other."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.keys: list[Tensor | None] = [None] * model.config.layers
        self.values: list[Tensor | None] = [None] * model.config.layers
        self.length = 0

    def forward(self, tokens: Any) -> Tensor:
        """Logits ``(n, vocab)`` behind each of the next ``n`` tokens."""
        ids = torch.as_tensor(tokens, device=self.model.device)[None]
        positions = torch.arange(self.length, self.length + ids.shape[1], device=ids.device)[None]
        hidden = self.model.forward(ids, positions, self._attend)
        self.length += ids.shape[1]
        return self.model.logits(hidden[0])

    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        config = self.model.config
        old, before = self.keys[layer], self.values[layer]
        keys = k[0] if old is None else torch.cat((old, k[0]))
        values = v[0] if before is None else torch.cat((before, v[0]))
        self.keys[layer], self.values[layer] = keys, values
        at = torch.arange(self.length, keys.shape[0], device=q.device)[:, None]
        key = torch.arange(keys.shape[0], device=q.device)[None]
        seen = key <= at
        if config.windowed(layer):
            seen &= key > at - config.window
        group = config.heads // config.kv_heads
        scores = torch.einsum("qhd,khd->hqk", q[0], keys.repeat_interleave(group, 1))
        scores = (scores * config.head_dim**-0.5).masked_fill(~seen, -torch.inf)
        out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values.repeat_interleave(group, 1))
        return out[None]
