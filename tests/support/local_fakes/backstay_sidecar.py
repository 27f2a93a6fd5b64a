"""A stand-in for the sidecar in tests of the runner: answers health and, at the leader, the job.

It lies in a folder that a test puts first on PYTHONPATH, so that `python -m backstay_sidecar`
finds this module before the real package. What it says of the job it reads from files that
`trainer.py` beside it writes.
"""

import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

TOPOLOGY = json.loads(Path(os.environ["BACKSTAY_TOPOLOGY"]).read_text())
POD = json.loads(Path(os.environ["BACKSTAY_POD"]).read_text())
WORLD = TOPOLOGY["replicas"] * TOPOLOGY["processes_per_replica"]
SHARED = Path(TOPOLOGY["tiers"]["local"]["root"]).parents[2] / "fake"
PHASES = {"wait": "Joining", "go": "Training", "done": "Finished"}


def ranks() -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted(SHARED.glob("rank-*.json"))]


def job_view() -> dict:
    found = ranks()
    attempt = max((rank["attempt"] for rank in found), default=0)
    same = len(found) == WORLD and {rank["attempt"] for rank in found} == {attempt}
    step = min((rank["step"] for rank in found), default=0)
    base = f"{found[0]['base']}-{attempt - 1}" if same and found[0]["base"] else None
    restore = {
        "attempt": attempt,
        "base": base,
        "finished": found[0]["begun"] if same else 0.0,
        "seconds": 0.5,
        "bytes_by_tier": {"memory": 1000} if base else {},
        "lost_steps": 1,
    }
    newest = {"tier": "memory", "newest": f"{step}-{attempt}"} if step else {"tier": "memory"}
    rank_views = [
        {
            "rank": rank["rank"],
            "step": rank["step"],
            "step_time": rank["time"],
            "published_step": rank["step"],
            "attempt": rank["attempt"],
            "state": 3,
        }
        for rank in found
    ]
    replica = {
        "replica": 0,
        "generation": POD["generation"],
        "address": "",
        "seen_seconds_ago": 0.0,
        "ranks": rank_views,
    }
    return {
        "run": f"{TOPOLOGY['namespace']}/{TOPOLOGY['run_name']}",
        "attempt": attempt if same else max(0, attempt - 1),
        "phase": "Training" if same else "Joining",
        "message": "" if same else "waiting for ranks",
        "step": step,
        "replicas": [replica],
        "tiers": [newest],
        "restores": [restore] if same else [],
        "newest_durable": None,
    }


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        status, body = 200, b"{}"
        if self.path == "/v1/job":
            if self.headers["Authorization"] != f"Bearer {os.environ['BACKSTAY_TOKEN']}":
                status = 401
            else:
                body = json.dumps(job_view()).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


def main() -> None:
    peer = next(p for p in TOPOLOGY["peers"] if p["replica"] == POD["replica"])
    host, _, port = peer["address"].partition(":")
    servers = [ThreadingHTTPServer((host, int(port) + i), Handler) for i in range(2)]
    for server in servers:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    print("fake sidecar up", sys.argv, flush=True)
    while True:
        time.sleep(3600)


main()
