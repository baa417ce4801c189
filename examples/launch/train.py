"""A training script as torchrun starts it: nothing in it knows of Ray or raytrainer.

Fits a line with DistributedDataParallel, saves a snapshot into the working directory after each epoch and
when it is told to stop, and goes on from it when it is started again.
"""

import argparse
import os
import signal

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel

stopping = False


def on_sigterm(number, frame):
    global stopping
    stopping = True


@record
def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--snapshot", default="snapshot.pt")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, on_sigterm)

    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group()
    rank, world_size = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(4, 1).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    epoch = 0
    if os.path.exists(options.snapshot):
        snapshot = torch.load(options.snapshot, map_location=device)
        model.module.load_state_dict(snapshot["model"])
        epoch = snapshot["epoch"]
        if rank == 0:
            print(f"going on at epoch {epoch}")

    while epoch < options.epochs:
        generator = torch.Generator().manual_seed(epoch)
        inputs = torch.randn(256, 4, generator=generator)
        targets = inputs.sum(dim=1, keepdim=True)
        # Each rank its share of the epoch.
        for batch in torch.arange(256).view(-1, 32):
            mine = batch[rank::world_size]
            loss = (model(inputs[mine].to(device)) - targets[mine].to(device)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        epoch += 1
        # All ranks have to agree on whether to stop.
        stop = torch.tensor(float(stopping), device=device)
        dist.all_reduce(stop)
        if rank == 0:
            torch.save({"model": model.module.state_dict(), "epoch": epoch}, options.snapshot)
            print(f"epoch {epoch}: loss {loss.item():.5f} on {world_size} ranks", flush=True)
        if stop.item():
            break
    # A wrapper that outlives its group ends some processes with SIGABRT at their exit (torch 2.14, gloo).
    del model
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
