"""SHA-256 over tensors and nested training state: equal exactly when every bit is equal."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch

_WRAPPERS = ("module.", "_orig_mod.")


def weights_sha256(state_dict: Mapping[str, Any]) -> str:
    """Over the sorted names, without what DDP and torch.compile put before them, and the raw bytes."""
    digest = hashlib.sha256()
    for name, value in sorted((_bare(name), value) for name, value in state_dict.items()):
        digest.update(name.encode() + b"\0")
        _update(digest, value)
    return digest.hexdigest()


def state_sha256(state: Any) -> str:
    """Over any nesting of mappings, sequences, tensors and plain values."""
    digest = hashlib.sha256()
    _update(digest, state)
    return digest.hexdigest()


def _bare(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _update(digest: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        tensor = value.detach().cpu().contiguous()
        digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy())
    elif isinstance(value, Mapping):
        digest.update(b"{")
        for key in sorted(value, key=repr):
            digest.update(repr(key).encode() + b":")
            _update(digest, value[key])
        digest.update(b"}")
    elif isinstance(value, list | tuple):
        digest.update(b"[")
        for item in value:
            _update(digest, item)
        digest.update(b"]")
    else:
        digest.update(repr(value).encode() + b";")
