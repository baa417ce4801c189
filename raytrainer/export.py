"""Writes a trained model to a folder, to be loaded without raytrainer: weights as safetensors, the whole
model as a program of torch.export, and a model.json that says what goes in and what comes out.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import raytrainer
from raytrainer.config import callable_from
from raytrainer.config.positions import parse_value
from raytrainer.data import EvalBatches, build_loader, class_names, preprocessing_of
from raytrainer.errors import ExportError, UsageError
from raytrainer.fingerprint import weights_sha256
from raytrainer.finished import FinishedRun
from raytrainer.storage import Storage, open_storage

FORMATS = ("safetensors", "torch-export", "both")
WEIGHTS_FILE, PROGRAM_FILE, METADATA_FILE = "model.safetensors", "model.pt2", "model.json"


def export_model(run: FinishedRun, out: str, format: str = "both") -> list[str]:
    """Writes `run`'s model, which lies on the CPU, to the folder `out`; returns the files' paths.

    model.safetensors has every entry of the model's state dict under its own name; model.pt2 takes inputs of
    any batch size. Raises UsageError when a file is there already, ExportError when torch.export cannot
    export the model: the other files are written all the same.
    """
    storage = open_storage(out)
    wanted = {"safetensors": [WEIGHTS_FILE], "torch-export": [PROGRAM_FILE]}.get(
        format, [WEIGHTS_FILE, PROGRAM_FILE]
    )
    for name in (WEIGHTS_FILE, PROGRAM_FILE, METADATA_FILE):
        if storage.exists(name):
            raise UsageError(
                f"{storage.path(name)} is there already\n  choose another folder, or remove what is in it"
            )
    data, where = run.example_data()
    inputs = _example_inputs(run, data, where)
    if WEIGHTS_FILE in wanted:
        storage.write(WEIGHTS_FILE, _safetensors(run))
    failure = None
    if PROGRAM_FILE in wanted:
        try:
            storage.write(PROGRAM_FILE, _program(run.model, inputs))
        except ExportError as error:
            wanted.remove(PROGRAM_FILE)
            failure = error
    if wanted:
        storage.write(
            METADATA_FILE, (json.dumps(_metadata(run, data, inputs, wanted), indent=2) + "\n").encode()
        )
    if failure is not None:
        raise ExportError(f"{failure}\n  {_what_was_written(storage, wanted)}") from failure
    return [storage.path(name) for name in [*wanted, METADATA_FILE]]


def _what_was_written(storage: Storage, names: list[str]) -> str:
    return f"{storage.path(names[0])} was written" if names else "nothing was written"


def _safetensors(run: FinishedRun) -> bytes:
    from safetensors.torch import save

    # Copies: the format takes no two tensors that share memory, as tied weights do.
    tensors = {
        name: value.detach().clone().contiguous()
        for name, value in run.model.state_dict().items()
        if isinstance(value, Tensor)
    }
    origin = {"format": "pt", "run": run.config.name, "checkpoint": run.checkpoint.name}
    return save(tensors, metadata={**origin, "raytrainer": raytrainer.__version__})


def _example_inputs(run: FinishedRun, data: Any, where: str) -> Tensor | None:
    """Two samples' inputs as the data set gives them; None where a batch is neither a pair nor a tensor."""
    config = run.config
    loader = build_loader(
        data,
        EvalBatches(min(2, len(data)), 2),
        config.data.loader.model_copy(update={"num_workers": 0, "prefetch_factor": None}),
        collate_fn=callable_from(config.data.collate_fn, at="data.collate_fn"),
        seed=config.seed,
        on_bad_sample=config.data.on_bad_sample,
        device_type="cpu",
        where=where,
    )
    batch = next(iter(loader)).batch
    inputs = batch[0] if isinstance(batch, list | tuple) and len(batch) == 2 else batch
    if not isinstance(inputs, Tensor) or inputs.dim() == 0 or len(inputs) == 0:
        return None
    # With one sample torch.export would take the batch size to be always 1.
    return inputs if len(inputs) > 1 else torch.cat([inputs, inputs])


def _program(model: nn.Module, inputs: Tensor | None) -> bytes:
    """The model as torch.export saves it, tried out at another batch size. Raises ExportError."""
    if inputs is None:
        raise ExportError(
            "torch.export needs an example input, and a batch of the evaluation data is neither a pair "
            "(inputs, targets) nor one tensor"
        )
    model.requires_grad_(False)
    program = _attempt(
        "cannot export the model",
        lambda: torch.export.export(
            model, (inputs,), dynamic_shapes=({0: torch.export.Dim("batch", min=1)},), strict=False
        ),
    )
    other = torch.cat([inputs, inputs[:1]])
    with torch.no_grad():
        expected = model(other)
        found = _attempt(
            f"gave a program that fails on a batch of {len(other)}", lambda: program.module()(other)
        )
    _check_same(found, expected)
    buffer = io.BytesIO()
    _attempt("cannot save the exported model", lambda: torch.export.save(program, buffer))
    return buffer.getvalue()


def _attempt(what: str, action: Callable[[], Any]) -> Any:
    # torch also logs what it raises, with a traceback of its own, and prints the graph as far as it came.
    logging.disable(logging.ERROR)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            return action()
    except Exception as error:  # torch.export runs the user's model and raises what it will: it is told
        message = next((line for line in str(error).splitlines() if line.strip()), "")
        raise ExportError(f"torch.export {what}: {type(error).__name__}: {message.strip()}") from error
    finally:
        logging.disable(logging.NOTSET)


def _check_same(found: Any, expected: Any) -> None:
    if isinstance(expected, Tensor):
        tolerance = 1e-4 * max(1.0, float(expected.abs().max()) if expected.numel() else 1.0)
        if found.shape != expected.shape or not torch.allclose(found, expected, rtol=1e-3, atol=tolerance):
            raise ExportError("torch.export gave a program whose outputs are not the model's")
    elif isinstance(expected, Mapping):
        for key, value in expected.items():
            _check_same(found[key], value)
    elif isinstance(expected, list | tuple):
        for one, other in zip(found, expected, strict=True):
            _check_same(one, other)


def _metadata(run: FinishedRun, data: Any, inputs: Tensor | None, files: list[str]) -> dict[str, Any]:
    """What one needs to know to use the files, and where they come from; no value of the environment."""
    model = parse_value(run.config.stored_yaml())["model"]
    described = None
    if inputs is not None:
        described = {"shape": [None, *inputs.shape[1:]], "dtype": str(inputs.dtype).removeprefix("torch.")}
    return {
        "files": files,
        "input": described,
        "preprocessing": preprocessing_of(data),
        "classes": class_names(data),
        "model": model,
        "weights_sha256": weights_sha256(run.model.state_dict()),
        "ema": run.uses_ema,
        "metrics": run.trained_metrics,
        "origin": {
            "run": run.config.name,
            "checkpoint": run.checkpoint.name,
            "step": run.checkpoint.step,
            "epoch": run.checkpoint.epoch,
            "raytrainer": raytrainer.__version__,
            "torch": torch.__version__,
        },
    }
