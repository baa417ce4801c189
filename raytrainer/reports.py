"""What the commands that come after training print: `eval`, `predict`, `export`."""

from __future__ import annotations

import json
import os
import sys

import torch

from raytrainer.errors import UsageError
from raytrainer.export import FORMATS, export_model
from raytrainer.finished import FinishedRun, open_run
from raytrainer.predict import ImagePredictor, Prediction
from raytrainer.table import as_table


def evaluation_report(run_dir: str, arguments: list[str], checkpoint: str, as_json: bool) -> str:
    """Evaluates. arguments: at most one config file, and overrides."""
    config, overrides = _split(arguments)
    run = open_run(run_dir, config=config, overrides=overrides, checkpoint=checkpoint)
    values = run.evaluate()
    if as_json:
        return json.dumps({**_origin(run), "metrics": values}, indent=2)
    # Those of the training are comparable only where nothing was changed.
    trained = {} if arguments else run.trained_metrics
    head = ["metric", "value", *(["in training"] if trained else [])]
    rows = [
        [name, f"{value:.6g}", *([f"{trained[name]:.6g}" if name in trained else "-"] if trained else [])]
        for name, value in values.items()
    ]
    return f"{_title(run)}\n{as_table(head, rows)}"


def print_predictions(run_dir: str, files: list[str], checkpoint: str, top_k: int, as_json: bool) -> int:
    """Predicts and prints, file by file; returns the exit code: 1 when some file could not be read."""
    predictor = ImagePredictor(open_run(run_dir, checkpoint=checkpoint))
    width = max(len(file) for file in files)
    predictions: list[Prediction] = []
    for prediction in predictor(files, top_k):
        predictions.append(prediction)
        if prediction.error is not None:
            print(f"error: {prediction.file}: {prediction.error}", file=sys.stderr)
        elif not as_json:
            answers = "   ".join(f"{name} {probability:.1%}" for name, probability in prediction.classes)
            print(f"{prediction.file.ljust(width)}  {answers}")
    if as_json:
        print(json.dumps([_as_mapping(prediction) for prediction in predictions], indent=2))
    return 1 if any(prediction.error is not None for prediction in predictions) else 0


def export_report(run_dir: str, out: str, checkpoint: str, format: str) -> str:
    """Exports; returns what was written."""
    if format not in FORMATS:
        raise UsageError(f"--format {format}\n  it is one of: {', '.join(FORMATS)}")
    run = open_run(run_dir, checkpoint=checkpoint, device=torch.device("cpu"))
    written = export_model(run, out, format)
    return "\n".join([_title(run), *(f"  {path}" for path in written)])


def _as_mapping(prediction: Prediction) -> dict[str, object]:
    if prediction.error is not None:
        return {"file": prediction.file, "error": prediction.error}
    classes = [{"class": name, "probability": value} for name, value in prediction.classes]
    return {"file": prediction.file, "predictions": classes}


def _split(arguments: list[str]) -> tuple[str | None, list[str]]:
    files = [text for text in arguments if "=" not in text or os.path.isfile(text)]
    if len(files) > 1:
        raise UsageError(
            f"{files[1]}: one config file at most, and overrides as KEY=VALUE: data.eval.split=train"
        )
    return (files[0] if files else None), [text for text in arguments if text not in files]


def _origin(run: FinishedRun) -> dict[str, object]:
    info = run.checkpoint
    return {
        "run_dir": run.root,
        "checkpoint": info.name,
        "step": info.step,
        "epoch": info.epoch,
        "ema": run.uses_ema,
    }


def _title(run: FinishedRun) -> str:
    average = ", moving average of the weights" if run.uses_ema else ""
    return f"{run.root}: {run.checkpoint.name} (epoch {run.checkpoint.epoch}{average})"
