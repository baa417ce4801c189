"""How many trials to pack on a card, from how fast they go together: the policy of `per_gpu: auto`; pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from raytrainer.table import as_table

# One more trial must raise the rate of all together to this many times what it was.
GAIN = 1.1


@dataclass(frozen=True)
class Probe:
    """So many trials on one card. steps_per_s: of all of them together; None when they did not fit, and
    `why` says so. peak_gib: the largest of their resident sizes."""

    count: int
    steps_per_s: float | None
    peak_gib: float = 0.0
    why: str = ""


@dataclass(frozen=True)
class Report:
    """A trial has come to `step` by `time_s` of its own clock."""

    time_s: float
    step: float


def next_count(probes: Sequence[Probe], most: int) -> int | None:
    """How many to try next, after these in the order of their counts; None when enough is known.

    most: more than this are never tried, since there are no more trials.
    """
    if not probes:
        return 1
    if probes[-1].steps_per_s is None or not _gains(probes):
        return None
    return probes[-1].count + 1 if probes[-1].count < most else None


def best_count(probes: Sequence[Probe]) -> int:
    """The last count that was worth it; 0 when not even one trial fits."""
    kept = [probe for probe in probes if probe.steps_per_s is not None]
    if len(kept) > 1 and not _gains(kept):
        return kept[-2].count
    return kept[-1].count if kept else 0


def fills_the_card(probes: Sequence[Probe]) -> bool:
    """Whether a second trial beside the first was tried, and brought nothing or did not fit."""
    return len(probes) > 1 and best_count(probes) == 1


def rate_of(reports: Mapping[int, Sequence[Report]], at_least_s: float) -> float | None:
    """Steps/s of all trials together, from what each has reported since all were under way.

    None while a trial's reports cover less than at_least_s seconds, or no step.
    """
    rates = []
    for each in reports.values():
        if len(each) < 2 or each[-1].time_s - each[0].time_s < at_least_s:
            return None
        rates.append((each[-1].step - each[0].step) / (each[-1].time_s - each[0].time_s))
    return sum(rates) if rates and min(rates) > 0 else None


def _gains(probes: Sequence[Probe]) -> bool:
    if len(probes) < 2:
        return True
    # Of measured numbers: what is just the bound counts as reaching it.
    return probes[-1].steps_per_s >= probes[-2].steps_per_s * GAIN * (1 - 1e-9)


def evidence(probes: Sequence[Probe]) -> str:
    """The measurements as a table."""
    rows, before = [], None
    for probe in probes:
        rate = probe.steps_per_s
        gain = "" if rate is None or before is None else f"{rate / before - 1:+.0%}"
        shown = probe.why if rate is None else f"{rate:.3g}"
        rows.append([str(probe.count), shown, gain, f"{probe.peak_gib:.2f} GiB" if probe.peak_gib else "-"])
        before = rate or before
    return as_table(("TRIALS ON A CARD", "STEPS/S TOGETHER", "GAIN", "MEMORY OF ONE"), rows)
