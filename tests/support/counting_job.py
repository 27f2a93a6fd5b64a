"""A tiny DDP training script for the runner's tests with everything real: counts its own steps.

After n steps every element of the weight is n, whatever happened in between.
"""

import sys
import time

import backstay
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

NUM_STEPS, PAUSE = int(sys.argv[1]), float(sys.argv[2])


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
            assert torch.all(model.weight == step), (step, model.weight)
            optimizer.zero_grad()
            (-parallel(torch.eye(8)).sum()).backward()
            optimizer.step()
            checkpointer.step(step + 1)
            time.sleep(PAUSE)
        assert torch.all(model.weight == NUM_STEPS)
    dist.destroy_process_group()
    print("the weight is", model.weight[0, 0].item(), flush=True)


main()
