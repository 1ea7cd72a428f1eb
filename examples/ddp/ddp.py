"""Train a model with PyTorch DDP: every worker is a rank, with its GPU if it has one."""

import argparse
import os

from distributed import Client
from ranks import run_ddp

EXAMPLES = 4096
WEIGHTS = [1.0, -2.0, 3.0, 0.5]


def train(epochs, loaders):
    """Fit a line through noisy data; return the rank, its device and the coefficients."""
    import torch
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.manual_seed(0)  # the same data on every rank; a real program reads its files
    x = torch.randn(EXAMPLES, len(WEIGHTS))
    y = x @ torch.tensor(WEIGHTS).unsqueeze(1) + 0.01 * torch.randn(EXAMPLES, 1)
    table = TensorDataset(x, y)
    sampler = DistributedSampler(table)  # each rank has its part
    # A fork of a process with threads can hang: the processes of the DataLoader are spawned.
    processes = {"multiprocessing_context": "spawn", "persistent_workers": True} if loaders else {}
    loader = DataLoader(table, batch_size=64, sampler=sampler, num_workers=loaders, **processes)

    model = DistributedDataParallel(torch.nn.Linear(len(WEIGHTS), 1).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(inputs.to(device)), targets.to(device))
            loss.backward()  # averages the gradients of all ranks
            optimizer.step()
    found = [round(value, 1) for value in model.module.weight.flatten().tolist()]
    return int(os.environ["RANK"]), str(device), found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=None, help="default: all that are connected")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--loaders", type=int, default=1, help="processes of a rank that load data")
    options = parser.parse_args()

    with Client() as client:
        results = run_ddp(client, train, options.epochs, options.loaders, n_workers=options.workers)
    for rank, device, found in results:
        print(f"rank {rank} on {device}: {found}")
    assert all(found == WEIGHTS for _, _, found in results)


if __name__ == "__main__":
    main()
