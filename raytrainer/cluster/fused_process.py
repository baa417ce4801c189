"""`python -m raytrainer.cluster.fused_process DIR NUMBER...`: trains these trials of a pack as one model.

Prints a line of JSON for each metric record of a trial, with "trial", its number, and for its end
{"trial", "ended": finished, stopped or failed, "message", "exit_code"}. Exits with 0 when all have ended so,
130 or 143 after a signal, 3 when they cannot be fused; then the last line has "not_fused", the reason.
"""

from __future__ import annotations

import json
import sys
import threading
from contextlib import ExitStack
from typing import Any

from raytrainer.build import build_data
from raytrainer.cluster.pack_fused import END_FILE
from raytrainer.cluster.signals import StopSignal, stop_on_signals
from raytrainer.config import Config, load_config
from raytrainer.errors import RaytrainerError, UsageError
from raytrainer.fused.group import Group
from raytrainer.fused.trial import EndWish, FusedTrial

NOT_FUSED_EXIT_CODE = 3


class _Lines:
    """Standard output, written to from the threads of several trials."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def tell(self, content: dict[str, Any]) -> None:
        with self._lock:
            sys.stdout.write(json.dumps(content, default=str) + "\n")
            sys.stdout.flush()


def main(arguments: list[str]) -> int:
    directory, numbers = arguments[0], [int(number) for number in arguments[1:]]
    lines, stop = _Lines(), StopSignal()
    with stop_on_signals(stop):
        try:
            _train(directory, numbers, lines, stop)
        except UsageError as error:
            lines.tell({"not_fused": str(error)})
            return NOT_FUSED_EXIT_CODE
    return stop.exit_code or 0


def _train(directory: str, numbers: list[int], lines: _Lines, stop: StopSignal) -> None:
    folders = {number: f"{directory}/trial_{number:03d}" for number in numbers}
    configs = {number: _config(folder) for number, folder in folders.items()}
    data = build_data(configs[numbers[0]])

    def ended(trial: FusedTrial, how: str | RaytrainerError) -> None:
        if isinstance(how, RaytrainerError):
            trial.fail(how)
            end = {"ended": "failed", "message": str(how), "exit_code": how.exit_code}
        else:
            result = trial.conclude(how)
            end = {"ended": result.status, "exit_code": 0 if result.status == "finished" else 143}
        lines.tell({"trial": trial.number, **end})

    with ExitStack() as opened:
        groups: dict[int, list[FusedTrial]] = {}
        for number, config in configs.items():
            wish = EndWish(stop, f"{folders[number]}/{END_FILE}")

            def observe(record: dict[str, Any], number: int = number) -> None:
                if "event" not in record:
                    lines.tell({"trial": number, **record})

            trial = FusedTrial(number, config, data, wish, observe)
            opened.enter_context(trial.opened())
            if trial.is_over:
                trial.begin()
                ended(trial, trial.between_steps(False))
            else:
                groups.setdefault(trial.state.progress.step, []).append(trial)
        # All are looked at before any begins.
        for group in [Group(trials, ended) for trials in groups.values()]:
            group.train()


def _config(folder: str) -> Config:
    """Loader workers for each trial would be too many; what a sample is does not depend on them."""
    return load_config(f"{folder}/config.yaml").with_overrides("data.loader={num_workers: 0}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
