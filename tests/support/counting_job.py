"""A tiny DDP training script for the runner's tests with everything real: counts its own steps.

After n steps every element of the weight is n, whatever happened in between. It goes no further
than the number in the permit file says, so that a test decides where it is when something breaks.
Arguments: the last step, the permit file.
"""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import backstay

NUM_STEPS, PERMIT = int(sys.argv[1]), Path(sys.argv[2])


def wait_for_permit(step: int) -> None:
    while int(PERMIT.read_text()) <= step:
        time.sleep(0.05)


def main() -> None:
    torch.set_num_threads(1)
    model = torch.nn.Linear(8, 8, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with backstay.Checkpointer({"model": model, "optimizer": optimizer}) as checkpointer:
        start = checkpointer.restore().step
        dist.init_process_group("gloo")
        parallel = DistributedDataParallel(model)
        for step in range(start, NUM_STEPS):
            wait_for_permit(step)
            assert torch.all(model.weight == step), (step, model.weight)
            optimizer.zero_grad()
            (-parallel(torch.eye(8)).sum()).backward()
            optimizer.step()
            checkpointer.step(step + 1)
        assert torch.all(model.weight == NUM_STEPS)
    dist.destroy_process_group()
    print("the weight is", model.weight[0, 0].item(), flush=True)


main()
