"""What a training step draws: dropout and the like depend on the seed, the step and the microbatch alone."""

from __future__ import annotations

import random

import numpy as np
import torch

from raytrainer.data import mix_seed

_STEP_STREAM = 0x57E9  # keeps dropout's seeds apart from those of shuffling and augmentation
_EVALUATION_STREAM = 0xE7A1


class StepRandomness:
    """Seeds all global generators before a microbatch, on whichever rank it is and whatever came before."""

    def __init__(self, seed: int, device: torch.device):
        self._seed, self._device = seed, device

    def for_training(self, step: int, microbatch: int) -> None:
        """step: of finished steps before it; microbatch: its number within the step."""
        self._set(_STEP_STREAM, step, microbatch)

    def for_evaluation(self, microbatch: int) -> None:
        """microbatch: its number within the evaluation data."""
        self._set(_EVALUATION_STREAM, 0, microbatch)

    def _set(self, stream: int, step: int, microbatch: int) -> None:
        seed = mix_seed(stream, self._seed, step, microbatch)
        random.seed(seed)
        # NumPy takes more than 32 bits only as an array, which is several times slower to seed with.
        np.random.seed(seed & 0xFFFF_FFFF)
        # torch.manual_seed would queue the seed, with a stack trace, for GPUs that this process never starts.
        torch.default_generator.manual_seed(seed)
        if self._device.type == "cuda":
            torch.cuda.manual_seed(seed)
