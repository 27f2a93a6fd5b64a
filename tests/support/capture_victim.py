"""Trainers that are killed at a fault point: `python -m support.capture_victim`.

Imports torch once and then forks a trainer for each line of JSON on stdin (folder, first, last,
faults); answers with its exit code. A trainer saves steps first..last with values that tell their
step, and leaves a forked worker behind that holds everything it inherited; its pid is in the file
`worker` of the folder.
"""

from __future__ import annotations

import json
import os
import sys
import time

import torch
import torch._dynamo  # by the first optimizer anyway: once, not in each trainer
from torch import nn

from backstay import copying
from backstay_protocol import faults
from support.capturing import ATTEMPT, FillOptimizer, Rank


def train(folder: str, first: int, last: int) -> None:
    torch.set_num_threads(1)
    copying.GROUP_TENSORS = 2  # several late groups, so that one can be cut short
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
    optimizer = FillOptimizer(model.parameters(), first - 1)
    rank = Rank(folder, {"model": model, "optimizer": optimizer})
    rank.engine.check()
    optimizer.step()
    worker = os.fork()
    if worker == 0:
        time.sleep(60)
        os._exit(0)
    with open(f"{folder}/worker", "w") as file:
        file.write(str(worker))
    for step in range(first, last + 1):
        rank.engine.save(step, ATTEMPT)
        optimizer.step()
        rank.engine.wait()
        rank.confirm(step)
    rank.close()


def main() -> None:
    for line in sys.stdin:
        asked = json.loads(line)
        child = os.fork()
        if child == 0:
            faults._faults = faults._parse(asked["faults"])
            train(asked["folder"], asked["first"], asked["last"])
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
