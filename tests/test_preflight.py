"""`raytrainer validate --deep`: what the run would do, and the mistakes that only the targets can tell."""

from __future__ import annotations

import pytest

from raytrainer.errors import TargetError
from raytrainer.preflight import deep_report
from tests.training import config

LR = "torch.optim.lr_scheduler"


def test_it_counts_samples_microbatches_and_steps(tmp_path):
    assert deep_report(config(tmp_path, "scaling.num_workers=2")).splitlines() == [
        "# training samples: 70",
        "# global batch: 16 samples, 4 microbatches of 4, on 2 workers",
        "# steps an epoch: 5, the last of 6 samples",
        "# total steps: 15",
    ]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.dropot=0.1", "model.dropot: .* takes no keyword dropot\n  did you mean dropout"),
        ("loss._target_=torch.nn.CrossEntropyLos", "loss: .*did you mean torch.nn.CrossEntropyLoss"),
        ("optimizer.momentun=1", "optimizer.momentun: .*did you mean momentum"),
        (f"scheduler={{_target_: {LR}.StepLR, step: 3}}", "scheduler.step: .*it takes: step_size"),
        (f"scheduler={{_target_: {LR}.StepLr}}", "scheduler: .*did you mean .*StepLR"),
        ("data.collate_fn=torch.utils.data.defalt_collate", "data.collate_fn: .*default_collate"),
    ],
)
def test_a_wrong_target_is_told_with_its_place_and_the_nearest_name(tmp_path, override, message):
    with pytest.raises(TargetError, match=f"(?s){message}"):
        deep_report(config(tmp_path, override))


def test_a_schedule_need_not_be_given_the_total_steps(tmp_path):
    one_cycle = f"scheduler={{_target_: {LR}.OneCycleLR, max_lr: 0.1}}"
    assert deep_report(config(tmp_path, one_cycle))
    assert deep_report(config(tmp_path, one_cycle, "scheduler.total_steps=7"))
