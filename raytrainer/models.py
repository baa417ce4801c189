"""Small models that the shipped configs train; each is one plain torch.nn.Module."""

from __future__ import annotations

from torch import Tensor, nn


class SmallCnn(nn.Module):
    """Two convolutions and two linear layers for small grey images; about 100,000 parameters.

    Takes float32 [N, in_channels, H, W] with H and W of at least 8, gives logits [N, num_classes].
    width: channels of the first convolution; dropout: of the hidden layer.
    """

    def __init__(self, num_classes: int = 10, in_channels: int = 1, width: int = 16, dropout: float = 0.25):
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
