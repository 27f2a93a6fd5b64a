"""A small GPT: the decoder-only transformer that the example trains, a few million parameters.

Used by train.py. Dropout is on while training, so a run that resumes without its random state ends
with other numbers; the token embedding is tied to the output layer, as in GPT-2 (Radford et al.,
2019), so a checkpoint has to cope with one parameter under two names. It must not know of Backstay.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """Shape of the model. The defaults make 2.7 million parameters."""

    vocabulary_size: int
    """Number of different characters in the text."""
    context_length: int = 64
    """Characters that the model sees at once."""
    num_layers: int = 6
    num_heads: int = 6
    width: int = 192
    """Size of the residual stream; a multiple of `num_heads`."""
    dropout: float = 0.1

    def __post_init__(self) -> None:
        if self.width % self.num_heads:
            raise ValueError(
                f"width {self.width} is not a multiple of num_heads {self.num_heads}; "
                "each head gets an equal part of it"
            )


class CausalSelfAttention(nn.Module):
    """Multi-head attention in which a position sees itself and what came before."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.dropout = config.dropout
        self.query_key_value = nn.Linear(config.width, 3 * config.width)
        self.output = nn.Linear(config.width, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, time, width] -> the same shape."""
        batch, time, width = x.shape
        heads = self.query_key_value(x).view(batch, time, 3 * self.num_heads, -1).transpose(1, 2)
        query, key, value = heads.chunk(3, dim=1)
        mixed = F.scaled_dot_product_attention(
            query,
            key,
            value,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=True,
        )
        mixed = mixed.transpose(1, 2).reshape(batch, time, width)
        return F.dropout(self.output(mixed), self.dropout, self.training)


class Block(nn.Module):
    """One transformer layer: attention and a two-layer network, each added to the stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = CausalSelfAttention(config)
        self.network_norm = nn.LayerNorm(config.width)
        self.network = nn.Sequential(
            nn.Linear(config.width, 4 * config.width),
            nn.GELU(),
            nn.Linear(4 * config.width, config.width),
            nn.Dropout(config.dropout),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, time, width] -> the same shape."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.network(self.network_norm(x))


class GPT(nn.Module):
    """Predicts each next character from those before it."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.characters = nn.Embedding(config.vocabulary_size, config.width)
        self.positions = nn.Embedding(config.context_length, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary_size, bias=False)
        self.head.weight = self.characters.weight
        self.apply(_initialise)

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        """Character numbers [batch, time] -> logits [batch, time, vocabulary]."""
        time = characters.shape[1]
        if time > self.config.context_length:
            raise ValueError(
                f"{time} characters given; this model sees {self.config.context_length} at once"
            )
        positions = torch.arange(time, device=characters.device)
        x = self.dropout(self.characters(characters) + self.positions(positions))
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits

    def num_parameters(self) -> int:
        """Trained numbers; the tied weight counts once."""
        return sum(p.numel() for p in self.parameters())

    @torch.no_grad()
    def continue_text(
        self, characters: list[int], length: int, generator: torch.Generator
    ) -> list[int]:
        """`characters` and `length` more, drawn from the model; only `generator` is advanced."""
        was_training = self.training
        self.eval()
        drawn = list(characters)
        for _ in range(length):
            seen = torch.tensor([drawn[-self.config.context_length :]])
            chances = F.softmax(self(seen)[0, -1], dim=-1)
            drawn.append(int(torch.multinomial(chances, 1, generator=generator)))
        self.train(was_training)
        return drawn


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
