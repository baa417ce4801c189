"""Random changes to whole batches of images, drawn from torch's global generator, which the loader seeds."""

from __future__ import annotations

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from torch import Tensor


def random_shift(images: Tensor, max_shift_px: int = 2) -> Tensor:
    """Moves each image by up to `max_shift_px` pixels in each direction, with zeros moving in.

    images: CPU tensor [N, H, W] of any type; returns the same shape and type.
    """
    num_images, height, width = images.shape
    border = max_shift_px
    pixels = images.numpy()
    padded = np.zeros((num_images, height + 2 * border, width + 2 * border), dtype=pixels.dtype)
    padded[:, border : border + height, border : border + width] = pixels
    # A view [N, 2*border+1, 2*border+1, H, W] of every place that an image can move to.
    windows = sliding_window_view(padded, (height, width), axis=(1, 2))
    rows, columns = torch.randint(0, 2 * border + 1, (2, num_images)).numpy()
    return torch.from_numpy(windows[np.arange(num_images), rows, columns])
