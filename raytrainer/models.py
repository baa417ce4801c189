"""Small models that the shipped configs train; each is one plain torch.nn.Module."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class SmallCnn(nn.Module):
    """Two convolutions and two linear layers for small grey images; about 100,000 parameters.

    Takes float32 [N, in_channels, H, W] with H and W of at least 8, gives logits [N, num_classes].
    width: channels of the first convolution; dropout: of the hidden layer.
    """

    def __init__(self, num_classes: int = 10, in_channels: int = 1, width: int = 16, dropout: float = 0.5):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(in_channels, width, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.AdaptiveMaxPool2d(7),
        )
        self.classifier = nn.Sequential(
            nn.Flatten(),
            nn.Linear(2 * width * 7 * 7, 64),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(64, num_classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.features(images))


class CharTransformer(nn.Module):
    """A small decoder-only transformer for text: pre-norm blocks, causal attention, learned positions.

    Takes int64 [N, T] token numbers below vocab_size, T at most block_size; gives logits [N, T, vocab_size].
    The defaults have 0.8 million parameters.
    """

    def __init__(
        self,
        vocab_size: int,
        block_size: int = 128,
        num_layers: int = 4,
        num_heads: int = 4,
        width: int = 128,
        dropout: float = 0.1,
    ):
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, width)
        self.positions = nn.Embedding(block_size, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(_Block(width, num_heads, dropout) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab_size, bias=False)
        # As in GPT-2 (Radford et al., 2019); torch's default for embeddings is 50 times as wide.
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.dropout(self.tokens(tokens) + self.positions(places))
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


class _Block(nn.Module):
    def __init__(self, width: int, num_heads: int, dropout: float):
        super().__init__()
        self.num_heads = num_heads
        self.dropout = dropout
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
            nn.Dropout(dropout),
        )

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self._attend(self.attention_norm(hidden))
        return hidden + self.feed_forward(hidden)

    def _attend(self, hidden: Tensor) -> Tensor:
        num_texts, length, width = hidden.shape
        heads = self.query_key_value(hidden).view(num_texts, length, 3, self.num_heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        attended = functional.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=True
        )
        return functional.dropout(
            self.project(attended.transpose(1, 2).reshape(num_texts, length, width)), dropout, self.training
        )
