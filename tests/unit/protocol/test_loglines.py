"""Lines of logs: what they are about, events, and that no secret gets into them."""

from __future__ import annotations

import json
import logging
from typing import Any

from backstay_protocol.loglines import JsonLines, Masks, TextLines

SIGNED = "http://store/b/k?X-Amz-Credential=AK%2F1&X-Amz-Signature=0badc0de&partNumber=1"


def record(message: str, *arguments: object, **extra: Any) -> logging.LogRecord:
    found = logging.LogRecord("backstay.x", logging.INFO, "f", 1, message, arguments, None)
    found.__dict__.update(extra)
    return found


def tree_of(one: logging.LogRecord, mask: Masks | None = None, **context: Any) -> dict[str, Any]:
    line = JsonLines(lambda: context, mask or Masks()).format(one)
    assert "\n" not in line
    tree: dict[str, Any] = json.loads(line)
    return tree


def test_a_line_is_about_what_its_record_says_else_its_context() -> None:
    tree = tree_of(record("a %s", "b", step=7), job="gpt", replica=0, step=41, attempt=None)
    assert tree["message"] == "a b"
    assert (tree["job"], tree["replica"], tree["step"]) == ("gpt", 0, 7)
    assert "attempt" not in tree


def test_an_event_is_its_kind_and_its_fields() -> None:
    fields = {"tier": "remote", "message": "the bucket is away"}
    tree = tree_of(record("tier_degraded tier=remote", event="tier_degraded", fields=fields))
    assert tree["event"] == "tier_degraded"
    assert tree["message"] == "the bucket is away"
    assert tree["fields"] == {"tier": "remote"}


def test_a_message_of_several_lines_is_one_line() -> None:
    assert tree_of(record("a\nb"))["message"] == "a\nb"


def test_secrets_are_masked_wherever_they_stand() -> None:
    mask = Masks()
    mask.hide(['s3cret"quoted', "", "abc"])
    one = record('token s3cret"quoted and %s', SIGNED, event="x", fields={"url": "abc"})
    for line in (
        JsonLines(dict, mask).format(one),
        TextLines(mask, "replica-0").format(one),
    ):
        for secret in ("s3cret", "0badc0de", "AK%2F1", "abc"):
            assert secret not in line
        assert "partNumber=1" in line or "event" in line


def test_a_bearers_token_is_masked_though_nobody_named_it() -> None:
    told = Masks()("GET /v1/job failed: {'Authorization': 'Bearer abc.DEF-123'}")
    assert told == "GET /v1/job failed: {'Authorization': 'Bearer ***'}"


def test_text_says_who_speaks() -> None:
    line = TextLines(Masks(), "replica-3").format(record("a %s", "b"))
    assert line.endswith("Z INFO    replica-3 backstay.x: a b")
