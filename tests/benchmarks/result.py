"""The weights that a contender ends with: equal ones prove that it did the same work."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.benchmarks.turns import NAME


def save_result(model: Any) -> None:
    """Called by the first rank after the last step."""
    import torch

    if "BENCH_FOLDER" in os.environ:
        torch.save(model.state_dict(), Path(os.environ["BENCH_FOLDER"], f"{os.environ[NAME]}.pt"))


@dataclass(frozen=True)
class Difference:
    """equal: to the bit; largest: absolute difference of two weights."""

    equal: bool
    largest: float


def difference(folder: Path, ours: str, theirs: str) -> Difference:
    """Compares the final weights of two contenders that ran in `folder`."""
    import torch

    a, b = _weights(folder, ours), _weights(folder, theirs)
    assert a.keys() == b.keys(), "the contenders trained different models"
    largest = max(float((a[name] - b[name]).abs().max()) for name in a)
    return Difference(all(torch.equal(a[name], b[name]) for name in a), largest)


def _weights(folder: Path, name: str) -> dict[str, Any]:
    import torch

    saved = folder / f"{name}.pt"
    if saved.is_file():
        return torch.load(saved)
    from raytrainer.checkpoint import read_weights

    return read_weights(str(folder / "runs" / name))
