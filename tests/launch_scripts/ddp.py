"""Trains with DDP over env:// and gloo, and goes on from the snapshot in its working directory."""

import json
import os

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel


@record
def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    dist.init_process_group(init_method="env://")  # no backend
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = 0
    if os.path.exists("snapshot.json"):
        with open("snapshot.json") as file:
            first = json.load(file)["step"]
    dist.barrier()
    if os.environ.get("FAIL") == str(dist.get_rank()):
        raise ValueError("the label of sample 7 is -1")
    for step in range(first, 6):
        torch.manual_seed(100 * step + local_rank)
        loss = model(torch.randn(4, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if dist.get_rank() == 0:
        with open("snapshot.json", "w") as file:
            json.dump({"step": 6}, file)
        weights = [value.tolist() for value in model.module.state_dict().values()]
        with open("result.json", "w") as file:
            json.dump({"first": first, "weights": weights, "world_size": dist.get_world_size()}, file)
    # A wrapper that outlives its group ends some processes with SIGABRT at their exit (torch 2.14, gloo).
    del model
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
