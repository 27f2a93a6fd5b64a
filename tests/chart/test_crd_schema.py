"""The definition of TrainingJob and what the operator reads can't drift apart.

What the API server makes of the definition is in tests/cluster/test_crd.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from backstay_operator.api import InvalidJob, TrainingJob, names, read_allowances, read_job
from support.bad_jobs import BAD, GONE, VALID, Bad, job
from support.rendered_chart import crd, schema

STRICT = read_allowances({})
Schema = dict[str, Any]
TEMPLATE = "spec.podTemplate"
NOT_OF_THE_SPEC = ("spec.podTemplate.spec", "spec.podTemplate.metadata.")


def walk(node: Schema, path: str = "") -> Iterator[tuple[str, Schema]]:
    """Every schema with its path; a list's items under `[]`."""
    yield path, node
    for name, inner in (node.get("properties") or {}).items():
        yield from walk(inner, f"{path}.{name}" if path else name)
    if "items" in node:
        yield from walk(node["items"], f"{path}[]")


SPEC = dict(walk(schema()["properties"]["spec"], "spec"))
STATUS = dict(walk(schema()["properties"]["status"], "status"))
EVERYTHING = SPEC | STATUS


@pytest.mark.parametrize("bad", BAD, ids=[bad.id for bad in BAD])
def test_the_operator_refuses_what_the_api_server_refuses(bad: Bad) -> None:
    with pytest.raises(InvalidJob) as caught:
        read_job(job(bad.changes), STRICT)
    assert caught.value.reason == "Invalid"


@pytest.mark.parametrize("changes", VALID.values(), ids=VALID)
def test_the_operator_takes_what_the_api_server_takes(changes: dict[str, Any]) -> None:
    assert isinstance(read_job(job(changes), STRICT), TrainingJob)


def fields_of_the_schema() -> dict[str, set[str]]:
    """Section -> its fields, without the pod's own."""
    sections: dict[str, set[str]] = {}
    for path in SPEC:
        if "." in path and not path.startswith(NOT_OF_THE_SPEC):
            section, _, name = path.rpartition(".")
            sections.setdefault(section, set()).add(name)
    return sections | {"spec.podTemplate": {"metadata", "spec"}}


def fields_that_are_read(section: str) -> set[str]:
    """Asked of the reader itself: what it knows stands in the line about a field it does not."""
    changes: dict[str, Any] = {f"{section}.qqqqqqq": 1}
    if section == "spec.restore.from":
        changes = {"spec.restore": {"from": {"qqqqqqq": 1}}}
    with pytest.raises(InvalidJob) as caught:
        read_job(job(changes), STRICT)
    (line,) = [p.text for p in caught.value.problems if p.path == f"{section}.qqqqqqq"]
    return set(line.partition("known: ")[2].split(", "))


@pytest.mark.parametrize("section", fields_of_the_schema())
def test_each_section_has_the_fields_that_are_read(section: str) -> None:
    assert fields_of_the_schema()[section] == fields_that_are_read(section)


def bounded() -> list[tuple[str, str, Any, bool]]:
    """Field, bound, a value, whether it is inside."""
    found: list[tuple[str, str, Any, bool]] = []
    for path, node in SPEC.items():
        if "minimum" in node and "x-kubernetes-int-or-string" not in node:
            less = node["minimum"] - (1 if node["type"] == "integer" else 0.01)
            found += [(path, "minimum", node["minimum"], True), (path, "minimum", less, False)]
        if "maximum" in node:
            found += [(path, "maximum", node["maximum"], True)]
            found += [(path, "maximum", node["maximum"] + 1, False)]
        for word in node.get("enum") or ():
            found.append((path, "enum", word, True))
        if "enum" in node:
            found.append((path, "enum", "else", False))
    return found


@pytest.mark.parametrize(
    ("path", "bound", "value", "inside"), bounded(), ids=lambda value: str(value)
)
def test_bounds_are_the_same_for_both(path: str, bound: str, value: Any, inside: bool) -> None:
    memory = {"everySteps": 1, "sizeLimit": "1Gi"}
    changes: dict[str, Any] = {"spec.checkpoint.memory": memory}
    if path.endswith("everySeconds"):
        changes = {
            "spec.checkpoint.memory": {"everySeconds": 0.1, "sizeLimit": "1Gi"},
            "spec.checkpoint.neighbor.everySteps": GONE,
            "spec.checkpoint.remote.everySteps": GONE,
        }
    if path == "spec.restore.attempt":
        changes["spec.restore.step"] = 1
    changes[path] = value
    try:
        read_job(job(changes), STRICT)
        lines = []
    except InvalidJob as error:
        lines = [problem.text for problem in error.problems if problem.path == path]
    told = [line for line in lines if "expected a" in line or "expected one of" in line]
    assert (told == []) == inside, lines


def test_every_field_has_words_and_every_setting_its_default() -> None:
    silent = [path for path, node in EVERYTHING.items() if "[]" not in path[-2:]]
    assert [path for path in silent if not EVERYTHING[path].get("description")] == []
    for path, node in SPEC.items():
        if path == "spec" or path.endswith("[]"):
            continue
        words = node["description"]
        assert re.search(r"[Rr]equired|Default|refused|Not `Always`|Always", words), path
        if "default" in node:
            shown = str(node["default"])
            shown = shown.lower() if node["type"] == "boolean" else shown
            assert f"efault {shown}" in words, path


def test_every_number_of_time_names_its_unit() -> None:
    for path, node in SPEC.items():
        if path.endswith("Seconds"):
            assert "second" in node["description"], path


def test_every_text_list_and_map_is_bounded() -> None:
    for path, node in EVERYTHING.items():
        if node.get("type") == "string" and "enum" not in node and "format" not in node:
            assert "maxLength" in node, path
        if node.get("type") == "array":
            assert "maxItems" in node, path
            assert node["x-kubernetes-list-type"] in ("map", "atomic"), path
        if "additionalProperties" in node:
            assert "maxProperties" in node, path
        if node.get("type") in ("integer", "number") and path in SPEC:
            assert {"minimum", "maximum"} <= set(node), path


def test_every_rule_says_what_to_do() -> None:
    rules = [
        rule for node in EVERYTHING.values() for rule in node.get("x-kubernetes-validations") or ()
    ]
    assert len(rules) > 30
    for rule in rules:
        says = re.search(
            r"write|remove|choose|delete the job|apply|make it|must be|only;|give", rule["message"]
        )
        assert says, rule["message"]


def test_the_definition_has_the_names_that_the_operator_uses() -> None:
    tree = crd()
    assert tree["metadata"]["name"] == names.CRD_NAME
    assert tree["metadata"]["annotations"] == {
        names.ANNOTATION_SCHEMA: str(names.SCHEMA_NUMBER),
        "helm.sh/resource-policy": "keep",
    }
    spec = tree["spec"]
    assert (spec["group"], spec["scope"]) == (names.GROUP, "Namespaced")
    assert (spec["names"]["kind"], spec["names"]["plural"]) == (names.KIND, names.PLURAL)
    assert spec["names"]["shortNames"] == ["tj"]
    assert spec["names"]["categories"] == ["all", "backstay"]
    (version,) = spec["versions"]
    assert (version["name"], version["subresources"]) == (names.VERSION, {"status": {}})


def test_conditions_are_a_map_by_type() -> None:
    conditions = STATUS["status.conditions"]
    assert conditions["x-kubernetes-list-type"] == "map"
    assert conditions["x-kubernetes-list-map-keys"] == ["type"]
    for name in names.CONDITIONS:
        assert name in conditions["description"]


def test_reasons_fit_what_a_condition_may_hold() -> None:
    pattern = STATUS["status.conditions[].reason"]["pattern"]
    reasons = [v for k, v in vars(names).items() if k.startswith("REASON_")]
    assert len(reasons) == len(set(reasons))
    assert all(re.fullmatch(pattern, reason) for reason in reasons)


def test_columns_read_plain_fields_of_the_status() -> None:
    (version,) = crd()["spec"]["versions"]
    for column in version["additionalPrinterColumns"]:
        path = column["jsonPath"].removeprefix(".")
        assert "[" not in path
        if not path.startswith("metadata."):
            assert EVERYTHING[path]["type"] == column["type"]
