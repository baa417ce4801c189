"""Random changes to whole batches of images, drawn from torch's global generator, which the loader seeds."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def random_shift(images: Tensor, max_shift_px: int = 2) -> Tensor:
    """Moves each image by up to `max_shift_px` pixels in each direction, with zeros moving in.

    images: [N, H, W] or [N, C, H, W], any type; returns the same shape and type.
    """
    num_images, *_, height, width = images.shape
    padded = functional.pad(images, (max_shift_px,) * 4)
    windows = padded.unfold(-2, height, 1).unfold(-2, width, 1)
    shifts = torch.randint(0, 2 * max_shift_px + 1, (2, num_images))
    if images.ndim == 3:
        return windows[torch.arange(num_images), shifts[0], shifts[1]]
    return windows[torch.arange(num_images), :, shifts[0], shifts[1]]
