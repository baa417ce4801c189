"""A generative adversarial network on digits: two networks, two optimizers, one Task."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

import raytrainer


class Gan(nn.Module):
    """generator: noise [N, noise_size] to images [N, 1, 28, 28]; discriminator: images to scores [N, 1]."""

    def __init__(self, noise_size: int = 64, width: int = 256):
        super().__init__()
        self.noise_size = noise_size
        self.generator = nn.Sequential(
            nn.Linear(noise_size, width),
            nn.ReLU(),
            nn.Linear(width, 784),
            nn.Unflatten(1, (1, 28, 28)),
        )
        self.discriminator = nn.Sequential(
            nn.Flatten(), nn.Linear(784, width), nn.LeakyReLU(0.2), nn.Linear(width, 1)
        )

    def forward(self, noise: Tensor) -> Tensor:
        return self.generator(noise)


class GanTask(raytrainer.Task):
    """Each step trains the discriminator, then the generator, on the same microbatches."""

    model: Gan

    def configure_optimizers(
        self, parameters: list[dict[str, Any]], build: Callable[..., torch.optim.Optimizer]
    ) -> dict[str, torch.optim.Optimizer]:
        return {
            "discriminator": build(self.model.discriminator.parameters()),
            "generator": build(self.model.generator.parameters()),
        }

    def training_step(self, batch: tuple[Tensor, Tensor], optimizer: str) -> raytrainer.StepOutput:
        images, _ = batch
        made = self.model(self._noise(len(images)))
        if optimizer == "generator":
            loss = self._score(made, is_real=True)
        else:
            loss = (self._score(images, is_real=True) + self._score(made.detach(), is_real=False)) / 2
        return raytrainer.StepOutput(loss, metrics={f"{optimizer}_loss": loss.detach()})

    def evaluation_step(self, batch: tuple[Tensor, Tensor]) -> raytrainer.EvaluationOutput:
        """How well the discriminator tells real images from made ones: ln 2 = 0.69 when it cannot."""
        images, _ = batch
        noise = torch.randn(
            len(images), self.model.noise_size, generator=torch.Generator().manual_seed(0)
        ).to(images.device)
        loss = (self._score(images, is_real=True) + self._score(self.model(noise), is_real=False)) / 2
        return raytrainer.EvaluationOutput(loss)

    def _noise(self, number: int) -> Tensor:
        # The trainer seeds this by (seed, step, microbatch): a resumed run draws what it would have drawn.
        return torch.randn(number, self.model.noise_size, device=self.device)

    def _score(self, images: Tensor, is_real: bool) -> Tensor:
        scores = self.model.discriminator(images)
        return binary_cross_entropy_with_logits(scores, torch.full_like(scores, float(is_real)))
