"""Which trials of a search are ended early: ASHA and the median rule, as pure rules over what trials report.

They decide as Ray Tune's schedulers of these names do where trials report often. Tune itself is not used: it
would start and place the trials, past the caps and the supervisors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from raytrainer.pack.status import TrialStatus, is_less_better, is_metric


class Rule(Protocol):
    """Judges trials by values of which more is better."""

    def why_end(self, trial: int, number: int, value: float) -> str | None:
        """Why the trial is to end after its number-th report (from 1), a finite value; None: it goes on."""
        ...


@dataclass
class Asha:
    """Asynchronous successive halving (Li et al., 2018), rungs at grace_period * reduction_factor**k.

    At a rung a trial is compared with those that came there before it: below the best 1/reduction_factor of
    their values it ends.
    """

    grace_period: int = 1
    reduction_factor: float = 4
    # The values by trial, by rung.
    rungs: dict[int, dict[int, float]] = field(default_factory=dict)

    def why_end(self, trial: int, number: int, value: float) -> str | None:
        rung = self._rung(number)
        if rung is None:
            return None
        before = self.rungs.setdefault(rung, {})
        if trial in before:
            return None
        cutoff, count = self._cutoff(list(before.values())), len(before)
        before[trial] = value
        if cutoff is None or value >= cutoff:
            return None
        return f"below the best 1 in {self.reduction_factor:g} of {count} trials at report {number}"

    def _rung(self, number: int) -> int | None:
        """The highest rung that is reached with that many reports."""
        if number < self.grace_period:
            return None
        # A sum of logarithms may lie just below the whole number that it stands for.
        exponent = math.log(number / self.grace_period) / math.log(self.reduction_factor)
        return math.floor(exponent + 1e-9)

    def _cutoff(self, values: list[float]) -> float | None:
        if not values:
            return None
        import numpy as np

        return float(np.percentile(values, (1 - 1 / self.reduction_factor) * 100))


@dataclass
class Median:
    """The median stopping rule (Golovin et al., 2017): a trial ends when the best that it has reported is
    below the median of the averages that the others had up to the same report."""

    grace_period: int = 1
    min_trials: int = 3
    values: dict[int, list[float]] = field(default_factory=dict)

    def why_end(self, trial: int, number: int, value: float) -> str | None:
        self.values.setdefault(trial, []).append(value)
        if number < self.grace_period:
            return None
        first = self.grace_period - 1
        means = [
            math.fsum(values[first:number]) / (number - first)
            for other, values in self.values.items()
            if other != trial and len(values) >= number
        ]
        if len(means) < self.min_trials:
            return None
        import numpy as np

        if max(self.values[trial]) >= float(np.median(means)):
            return None
        return f"its best is below the median of {len(means)} other trials at report {number}"


class Search:
    """The course of one search: takes in what trials report, and says which are to end.

    rule: None where all run to their end.
    """

    def __init__(self, rule: Rule | None, metric: str | None, mode: str | None, grace_period: int = 1):
        self._rule, self._metric = rule, metric
        self._less_is_better = metric is not None and is_less_better(metric, mode)
        self._grace_period = grace_period
        self._numbers: dict[int, int] = {}
        self._steps: dict[int, float] = {}

    @classmethod
    def of_settings(cls, search: Mapping[str, Any] | None, metric: str | None, mode: str | None) -> Search:
        """search: of `PackSettings`."""
        if search is None or search["scheduler"] == "none":
            return cls(None, metric, mode)
        grace = search["grace_period"]
        rule = Asha(grace, search["reduction_factor"])
        if search["scheduler"] == "median":
            rule = Median(grace, search["min_trials"])
        return cls(rule, metric, mode, grace)

    def resume(self, statuses: Iterable[TrialStatus]) -> None:
        """Take in what earlier runs of the search have seen (of long curves, the points that were kept)."""
        for status in statuses:
            for step, value in status.curve:
                self._why_end(status.trial, step, value)

    def why_end(self, trial: int, record: Mapping[str, Any]) -> str | None:
        """Why the trial is to end after one record of its metrics; None: it goes on."""
        value = record.get(self._metric or "")
        if self._rule is None or not is_metric(self._metric, value):
            return None
        step = record.get("step")
        return self._why_end(trial, step if is_metric("", step) else None, float(value))

    def _why_end(self, trial: int, step: float | None, value: float) -> str | None:
        # A trial that was started again repeats what it has reported before.
        if step is not None:
            if step <= self._steps.get(trial, -math.inf):
                return None
            self._steps[trial] = step
        number = self._numbers[trial] = self._numbers.get(trial, 0) + 1
        if self._rule is None:
            return None
        shown = f"{self._metric} {value:.4g}"
        if not math.isfinite(value):
            return shown if number >= self._grace_period else None
        why = self._rule.why_end(trial, number, -value if self._less_is_better else value)
        return why and f"{shown}: {why}"
