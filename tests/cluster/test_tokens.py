"""A job's API answers its own token; what answers without one tells nothing else."""

from __future__ import annotations

from collections.abc import Callable

from cluster.training import PORT_API, PORT_HEALTH, Job, ask

ROUTES = ("/v1/job", "/v1/status", "/v1/checkpoints", "/v1/events", "/openapi.json", "/nowhere")
OPEN = ("/healthz", "/readyz", "/metrics")


def test_the_api_refuses_whoever_has_no_token_or_another_jobs(
    long_job: Job, make_job: Callable[..., Job]
) -> None:
    other = make_job("other", suspend=True)
    other.apply()
    try:
        foreign = other.wait("a token of its own", other.token, 60)
    finally:
        other.delete()
    with long_job.port(0, PORT_API) as base:
        for token in ("", foreign, f"{long_job.token()}x"):
            codes = {path: ask(base + path, token)[0] for path in ROUTES}
            assert codes == dict.fromkeys(ROUTES, 401)
            assert ask(f"{base}/v1/flush", token, method="POST")[0] == 401
        assert ask(f"{base}/v1/job", long_job.token())[0] == 200


def test_the_health_port_tells_health_and_metrics_and_nothing_else(long_job: Job) -> None:
    token = long_job.token()
    with long_job.port(1, PORT_HEALTH) as base:
        answers = {path: ask(base + path) for path in OPEN}
        assert {path: code for path, (code, _) in answers.items()} == dict.fromkeys(OPEN, 200)
        assert "backstay_step" in answers["/metrics"][1]
        assert all(token not in body for _, body in answers.values())
        codes = {path: ask(base + path, token)[0] for path in ROUTES}
        assert codes == dict.fromkeys(ROUTES, 404)
