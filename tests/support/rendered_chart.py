"""charts/backstay rendered by Helm's own code (helm-python-sdk), without a cluster."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import helm_python
import yaml

CHART = Path(__file__).resolve().parents[2] / "charts" / "backstay"
RELEASE = "backstay"
NAMESPACE = "backstay-system"
Tree = dict[str, Any]


def objects(values: Tree | None = None, release: str = RELEASE) -> list[Tree]:
    """Every object of a release. Raises helm_python.HelmError for values that are refused."""
    texts = rendered(values, release)
    found = []
    for path, text in sorted(texts.items()):
        if path.endswith(".yaml"):
            found += [tree for tree in yaml.safe_load_all(text) if tree]
    return found


def rendered(values: Tree | None = None, release: str = RELEASE) -> dict[str, str]:
    """Template's path -> its text."""
    with helm_python.Chart.load(CHART) as chart:
        return chart.render(values or {}, name=release, namespace=NAMESPACE)


def the(kind: str, among: list[Tree], name: str = "") -> Tree:
    """The one object of a kind (and name)."""
    (found,) = [
        tree for tree in among if tree["kind"] == kind and name in ("", tree["metadata"]["name"])
    ]
    return found


@cache
def _crd() -> Tree:
    return the("CustomResourceDefinition", objects())


def crd() -> Tree:
    """The definition of TrainingJob."""
    return _crd()


def schema() -> Tree:
    """Its schema."""
    (version,) = crd()["spec"]["versions"]
    found: Tree = version["schema"]["openAPIV3Schema"]
    return found
