"""A stand-in for a trainer: counts steps in a file of its rank, all ranks in one attempt.

It forms worlds without any sidecar: each rank announces its process, and when the set of living
processes is whole and new, that is the next attempt. Arguments: shared folder, last step, seconds
a step; `--grandchildren` leaves a tree of processes, daemons among them, behind.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

SHARED, LAST, PAUSE = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def write(path: Path, value: dict) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(value))
    temporary.rename(path)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def world() -> dict[int, int]:
    """Rank -> process, of those that live."""
    found = {}
    for path in SHARED.glob("member-*.json"):
        member = json.loads(path.read_text())
        if alive(member["pid"]):
            found[member["rank"]] = member["pid"]
    return found


def attempt_of(members: dict[int, int]) -> int:
    """Each whole set of processes has a number, one above those before it."""
    name = "-".join(str(members[rank]) for rank in sorted(members))
    folder = SHARED / "worlds"
    folder.mkdir(exist_ok=True)
    own = folder / name
    if not own.exists():
        own.write_text("")
    in_order = sorted(folder.iterdir(), key=lambda path: path.stat().st_ctime_ns)
    return in_order.index(own) + 1


def main() -> None:
    SHARED.mkdir(parents=True, exist_ok=True)
    if "--grandchildren" in sys.argv:
        daemon = "setsid sh -c 'sleep 1000 & (setsid sleep 1001 &) ; sleep 1002' &"
        subprocess.run(["sh", "-c", f"{daemon} sleep 1003 & true"], check=True)
    write(SHARED / f"member-{RANK}.json", {"rank": RANK, "pid": os.getpid()})
    own = SHARED / f"rank-{RANK}.json"
    step = json.loads(own.read_text())["step"] if own.exists() else 0
    attempt, base, begun = 0, 0, 0.0
    while step < LAST:
        members = world()
        if len(members) == WORLD:
            now = attempt_of(members)
            if now != attempt:
                attempt, base, begun = now, step, time.time()
            step += 1
        time.sleep(PAUSE)
        write(
            own,
            {
                "rank": RANK,
                "step": step,
                "attempt": attempt,
                "base": base,
                "begun": begun,
                "time": time.time(),
            },
        )
    print(f"rank {RANK} done at {step}", flush=True)


main()
