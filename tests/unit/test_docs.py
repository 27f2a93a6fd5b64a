"""What the docs name exists, and what exists is named: routes, exports, commands, links, files."""

from __future__ import annotations

import ast
import asyncio
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import httpx
import pytest
import typer
import yaml
from fastapi.routing import APIRoute

from backstay_cli.main import app as command
from backstay_operator.api import read_job
from backstay_protocol import codec
from backstay_protocol.clock import SYSTEM_CLOCK
from backstay_protocol.topology import Peer, PodIdentity, Tiers, Topology
from backstay_sidecar.agent import Agent
from backstay_sidecar.app import applications
from backstay_sidecar.routes import health
from backstay_sidecar.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
TOKEN = "0123456789abcdef0123"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
_ROUTE = re.compile(r"\b(GET|HEAD|POST|PUT|DELETE) (/[A-Za-z0-9_{}/]+)")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


def read(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    kind: str
    text: str
    line: int


def blocks(page: Path, kind: str) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(found[1], found[2], text.count("\n", 0, found.start()) + 2)
        for found in _BLOCK.finditer(text)
        if found[1] == kind
    ]


def agent(folder: Path) -> Agent:
    """A sidecar that is never started: its routes are all that is asked for."""
    topology = Topology(
        namespace="ns",
        job="job",
        run_name="run",
        uid="uid",
        replicas=1,
        processes_per_replica=1,
        peers=(Peer(replica=0, address="127.0.0.1:1"),),
        tiers=Tiers(),
    )
    settings = Settings(
        topology=topology,
        pod=PodIdentity(replica=0),
        volume=str(folder),
        tokens=(TOKEN,),
        listen_host="127.0.0.1",
        api_port=1,
        health_port=2,
    )
    return Agent(settings, SYSTEM_CLOCK)


async def routes_of(one: Agent) -> set[str]:
    """`METHOD /path` of all three listeners; the health port has no OpenAPI document."""
    apps = applications(one)
    found = {
        f"{method} {route.path}"
        for route in health.router(one).routes
        if isinstance(route, APIRoute)
        for method in route.methods
    }
    for app in (apps.trainer, apps.api):
        transport = httpx.ASGITransport(app)
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with httpx.AsyncClient(
            transport=transport, base_url="http://it", headers=headers
        ) as client:
            paths = (await client.get("/openapi.json")).raise_for_status().json()["paths"]
        found |= {f"{m.upper()} {path}" for path, methods in paths.items() for m in methods}
    return found


@pytest.fixture(scope="module")
def routes(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    async def ask() -> set[str]:
        one = agent(tmp_path_factory.mktemp("memory"))
        try:
            return await routes_of(one)
        finally:
            await one.peers.close()

    return asyncio.run(ask())


def test_every_route_is_in_the_rest_page_and_every_route_of_that_page_exists(
    routes: set[str],
) -> None:
    told = {f"{method} {path}" for method, path in _ROUTE.findall(read("rest-api.md"))}
    assert told == routes


def test_every_error_code_is_in_the_rest_page() -> None:
    source = (ROOT / "sidecar/backstay_sidecar/errors.py").read_text(encoding="utf-8")
    codes = re.findall(r'^[A-Z_]+ = "(\w+)"$', source, re.MULTILINE)
    page = read("rest-api.md")
    assert codes
    assert [code for code in codes if f"`{code}`" not in page] == []


def test_every_metric_is_in_the_rest_page() -> None:
    source = (ROOT / "sidecar/backstay_sidecar/metrics.py").read_text(encoding="utf-8")
    kinds = re.findall(r'(Counter|Gauge)\(\s*"(backstay_\w+)"', source)
    names = {name + ("_total" if kind == "Counter" else "") for kind, name in kinds}
    told = set(re.findall(r"^\| `(backstay_\w+)`", read("rest-api.md"), re.MULTILINE))
    assert told == names


def test_every_event_of_the_sidecar_is_in_the_rest_page() -> None:
    page = read("rest-api.md")
    kinds = {
        kind
        for path in (ROOT / "sidecar").rglob("*.py")
        for kind in re.findall(r'emit\(\s*"(\w+)"', path.read_text(encoding="utf-8"))
    }
    assert kinds
    assert sorted(kind for kind in kinds if f"`{kind}`" not in page) == []


def test_every_exported_name_is_in_the_library_page() -> None:
    page = read("trainer-library.md")
    names = assigned("trainer_lib/backstay/__init__.py", "__all__")
    assert "Checkpointer" in names
    assert [name for name in names if f"`{name}`" not in page] == []


def test_every_argument_of_the_checkpointer_is_in_the_library_page() -> None:
    page = read("trainer-library.md")
    names = arguments("trainer_lib/backstay/checkpointer.py", "Checkpointer", "__init__")
    assert "state" in names
    assert [name for name in names if f"`{name}`" not in page] == []


def parsed(source: str) -> ast.Module:
    """The library's source, without importing torch for it."""
    return ast.parse((ROOT / source).read_text(encoding="utf-8"))


def assigned(source: str, name: str) -> list[str]:
    for node in parsed(source).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return list(ast.literal_eval(node.value))
    raise AssertionError(f"{source} has no {name}")


def arguments(source: str, owner: str, method: str) -> list[str]:
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.ClassDef) and node.name == owner:
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef) and inner.name == method:
                    given = [*inner.args.args[1:], *inner.args.kwonlyargs]
                    return [argument.arg for argument in given]
    raise AssertionError(f"{source} has no {owner}.{method}")


def test_every_command_is_in_the_operations_page() -> None:
    page = read("operations.md")
    assert [name for name in commands(command) if f"`backstay {name}" not in page] == []


def commands(app: typer.Typer, prefix: str = "") -> Iterator[str]:
    for one in app.registered_commands:
        assert one.callback is not None
        yield prefix + (one.name or one.callback.__name__.replace("_", "-"))
    for group in app.registered_groups:
        assert group.typer_instance is not None
        yield from commands(group.typer_instance, f"{prefix}{group.name} ")


def test_every_field_of_a_topology_is_in_the_example_of_the_operations_page() -> None:
    example, *_ = blocks(DOCS / "operations.md", "json")
    tree = json.loads(example.text)
    codec.from_plain(Topology, tree)
    assert list(missing_fields(Topology, tree)) == []


def missing_fields(kind: Any, tree: Any, path: str = "") -> Iterator[str]:
    """Fields of a dataclass that a JSON tree leaves out; of schedules one of two is enough."""
    nested = [one for one in (kind, *get_args(kind)) if isinstance(one, type) and is_dataclass(one)]
    if not nested or tree is None:
        return
    hints = get_type_hints(nested[0])
    for item in tree if isinstance(tree, list) else [tree]:
        for field in fields(nested[0]):
            if field.name in item:
                yield from missing_fields(
                    hints[field.name], item[field.name], f"{path}.{field.name}"
                )
            elif not field.name.startswith("every_") and field.name not in optional_here(path):
                yield f"{path}.{field.name}"


def optional_here(path: str) -> tuple[str, ...]:
    """Left out on purpose: the example's neighbour takes everything else by default."""
    return ("retention",) if path.endswith(".neighbor") else ()


def test_every_field_of_the_job_manifest_is_in_the_operations_page() -> None:
    page = read("operations.md")
    folder = ROOT / "operator/backstay_operator/api"
    source = "".join(path.read_text(encoding="utf-8") for path in folder.glob("read*.py"))
    names = set(
        re.findall(r'\.(?:integer|seconds|boolean|choice|text|raw)\(\s*"(\w+)"', source)
    ) | set(re.findall(r'\.(?:section|required_section|quantity_bytes)\(\s*"(\w+)"', source))
    names -= {"status"}  # Backstay's own
    assert names >= {"everySteps", "sizeLimit", "quarantineAfter"}
    assert sorted(name for name in names if not re.search(rf"\b{name}\b", page)) == []


def test_the_manifests_in_the_docs_are_valid() -> None:
    found = [block for page in PAGES for block in blocks(page, "yaml")]
    assert found
    for block in found:
        read_job(yaml.safe_load(block.text))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    broken = []
    for target in _LINK.findall(page.read_text(encoding="utf-8")):
        if "://" in target or target.startswith("mailto:"):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        if not there.exists() or (anchor and anchor not in anchors(there)):
            broken.append(target)
    assert broken == []


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    text = _BLOCK.sub("", page.read_text(encoding="utf-8"))
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")
        for heading in _HEADING.findall(text)
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_and_json_in_the_docs_can_be_read(page: Path) -> None:
    for block in blocks(page, "python"):
        compile("\n" * (block.line - 1) + block.text, str(page), "exec")
    for block in blocks(page, "json"):
        json.loads(block.text)


def test_every_decision_has_a_number_of_its_own_and_the_same_parts() -> None:
    pages = sorted((DOCS / "adr").glob("*.md"))
    numbers = [page.name[:4] for page in pages]
    assert len(set(numbers)) == len(numbers)
    for page in pages:
        text = page.read_text(encoding="utf-8")
        parts = ("Question", "Drivers", "Options", "Outcome", "Consequences")
        assert [part for part in parts if f"\n## {part}\n" not in text] == [], page.name
        assert "\n- Status: " in text
        assert "\n- Date: " in text
