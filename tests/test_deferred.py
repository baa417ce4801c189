"""Tests that a process which compiles nothing imports no compiler, and that one which does finds it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TRAIN = """
import os, sys, warnings
import torch
import torch.distributed as dist
from raytrainer.deferred import defer_compiler
if {deferred}:
    assert defer_compiler()
warnings.simplefilter("ignore")
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
import torchmetrics.classification, torchvision
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
torch.manual_seed(0)
model = torch.nn.Linear(3, 3)
ddp = torch.nn.parallel.DistributedDataParallel(model)
for kind in (torch.optim.AdamW, torch.optim.SGD):
    optimizer = kind(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=5)
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = ddp(torch.ones(2, 3)).sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.add_param_group({{"params": [torch.nn.Parameter(torch.ones(1))]}})
ema = torch.optim.swa_utils.AveragedModel(model)
ema.update_parameters(model)
assert hasattr(sys.modules["torch._dynamo"], "__file__") is not {deferred}
assert ("sympy" in sys.modules) is not {deferred}
print(model.weight.tolist(), optimizer.state_dict()["state"])
dist.destroy_process_group()
"""

COMPILE = """
import sys
import torch
from raytrainer.deferred import defer_compiler
assert defer_compiler()
model = torch.nn.Linear(3, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
assert "sympy" not in sys.modules
compiled = torch.compile(model, backend="eager")
loss = compiled(torch.ones(2, 3)).sum()
loss.backward()
optimizer.step()
optimizer.zero_grad()
assert torch._dynamo is sys.modules["torch._dynamo"]
assert torch._dynamo.utils.get_optimize_ddp_mode() == "ddp_optimizer"
assert not defer_compiler()
print("compiled")
"""

ATTRIBUTE = """
import sys
import torch
from raytrainer.deferred import defer_compiler
assert defer_compiler()
import torchvision
assert "sympy" not in sys.modules
import torch._dynamo.config as config
assert config.optimize_ddp is True
torch._dynamo.reset()
assert torch._dynamo.utils.counters is sys.modules["torch._dynamo.utils"].counters
from torchvision.ops.roi_align import is_compile_supported
assert is_compile_supported("cpu") is torch._dynamo.utils.is_compile_supported("cpu")
print("reached")
"""


def output_of(code):
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_training_without_the_compiler_gives_the_same_weights():
    assert output_of(TRAIN.format(deferred=True)) == output_of(TRAIN.format(deferred=False))


@pytest.mark.parametrize(("code", "said"), [(COMPILE, "compiled\n"), (ATTRIBUTE, "reached\n")])
def test_code_that_does_use_the_compiler_finds_it(code, said):
    assert output_of(code) == said
