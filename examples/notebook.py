"""From Python: classes defined right here, a config as a dict, and the result as an object.

The cells below are those of a notebook; as a script it runs with `python examples/notebook.py`.
"""

# %% A model and data of the notebook's own
import torch
from torch import nn

import raytrainer


class Waves(torch.utils.data.Dataset):
    """Noisy points of a sine curve."""

    def __init__(self, num_points: int, seed: int):
        generator = torch.Generator().manual_seed(seed)
        self.x = 6.0 * torch.rand(num_points, 1, generator=generator) - 3.0
        self.y = torch.sin(2 * self.x) + 0.1 * torch.randn(num_points, 1, generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index], self.y[index]


def make_model(width: int = 64) -> nn.Module:
    return nn.Sequential(
        nn.Linear(1, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
    )


# %% A config; objects take the places of the targets that a YAML file would have
CONFIG = {
    "name": "waves",
    "scaling": {"num_workers": 2},
    "data": {"global_batch_size": 64, "micro_batch_size": 32},
    "loss": {"_target_": "torch.nn.MSELoss"},
    "optimizer": {"_target_": "torch.optim.AdamW", "lr": 1e-2},
    "training": {"max_epochs": 10},
    "checkpoint": {"monitor": "eval/loss", "mode": "min"},
}


def in_this_process(storage_path: str = "runs") -> raytrainer.Result:
    """In this process alone, with no Ray: to step through with a debugger, or for small models."""
    objects = {
        "data.train": Waves(1000, seed=0),
        "data.eval": Waves(200, seed=1),
        "model": make_model(),
    }
    config = raytrainer.Config.from_mapping(CONFIG, [f"storage_path={storage_path}"], objects=objects)
    losses = []
    trainer = raytrainer.Trainer(config, observer=lambda record: losses.append(record.get("eval/loss")))
    result = trainer.train()
    print(f"{result.steps} steps; losses {[round(loss, 3) for loss in losses if loss is not None]}")
    return result


def on_two_workers(storage_path: str = "runs") -> raytrainer.Result:
    """The same on two workers. `local=True` starts them on this machine; without it they come from Ray."""
    return raytrainer.run(
        {**CONFIG, "name": "waves_2"},
        overrides=[f"storage_path={storage_path}"],
        train=Waves(1000, seed=0),
        eval=Waves(200, seed=1),
        model=make_model(),
        local=True,
    )


# %%
if __name__ == "__main__":
    in_this_process()
    print(on_two_workers().best)
