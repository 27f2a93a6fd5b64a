"""The operator's settings file, `/etc/backstay/operator.yaml`, as the chart writes it.

Main reads it. Unknown keys are refused: a setting that would be ignored is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from backstay_operator.api.allow import Allowances, read_allowances
from backstay_operator.api.section import InvalidJob
from backstay_operator.errors import ConfigError
from backstay_operator.settings import ClusterSettings, SidecarSettings
from backstay_protocol.loglines import FORMATS, JSON

ENV_CONFIG = "BACKSTAY_OPERATOR_CONFIG"
DEFAULT_PATH = "/etc/backstay/operator.yaml"


@dataclass(frozen=True, kw_only=True)
class LeaseSettings:
    """`leaderElection`: which replica of the operator works."""

    enabled: bool = True
    name: str = "backstay-operator"
    namespace: str = ""
    """Empty: the operator's own."""


@dataclass(frozen=True, kw_only=True)
class OperatorConfig:
    """The whole file."""

    cluster_name: str = ""
    """Owner of runs, with the job's uid; empty: the uid of kube-system."""
    namespaces: tuple[str, ...] = ()
    """Empty: all."""
    sidecar: SidecarSettings = field(default_factory=SidecarSettings)
    allow: Allowances = field(default_factory=lambda: read_allowances({}))
    cluster: ClusterSettings = field(default_factory=ClusterSettings)
    lease: LeaseSettings = field(default_factory=LeaseSettings)
    metrics_port: int = 8080
    health_port: int = 8081
    log_level: str = "info"
    log_json: bool = True


def read_config(tree: object) -> OperatorConfig:
    """Raises ConfigError naming the key."""
    top = _Part(tree, "")
    sidecar, lease = top.part("sidecar"), top.part("leaderElection")
    ports, log = top.part("ports"), top.part("log")
    try:
        allow = read_allowances(top.raw("allow"))
    except InvalidJob as error:
        raise ConfigError(f"operator.yaml: {error}") from error
    defaults = ClusterSettings()
    taints = top.texts("drainTaints", defaults.drain_taints)
    lost = top.number("nodeLostSeconds", defaults.node_lost_seconds)
    form = log.choice("format", FORMATS, JSON)
    config = OperatorConfig(
        cluster_name=top.text("clusterName", ""),
        namespaces=top.texts("namespaces", ()),
        sidecar=replace(_read_sidecar(sidecar), log_format=form),
        allow=allow,
        cluster=ClusterSettings(drain_taints=taints, node_lost_seconds=lost),
        lease=LeaseSettings(
            enabled=lease.flag("enabled", True),
            name=lease.text("leaseName", "backstay-operator"),
            namespace=lease.text("namespace", ""),
        ),
        metrics_port=int(ports.number("metrics", 8080)),
        health_port=int(ports.number("health", 8081)),
        log_level=log.text("level", "info"),
        log_json=form == JSON,
    )
    for part in (top, sidecar, lease, ports, log):
        part.refuse_unknown()
    return config


def _read_sidecar(part: _Part) -> SidecarSettings:
    defaults = SidecarSettings()
    image = part.text("image", "")
    if not image:
        raise ConfigError("operator.yaml: sidecar.image is missing; pods would have no sidecar")
    return SidecarSettings(
        image=image,
        cpu=part.text("cpu", defaults.cpu),
        memory=part.text("memory", defaults.memory),
        grace_seconds=int(part.number("graceSeconds", defaults.grace_seconds)),
        pull_policy=part.text("pullPolicy", ""),
    )


class _Part:
    """One mapping of the file; remembers which keys were read."""

    def __init__(self, tree: object, path: str) -> None:
        if tree is None:
            tree = {}
        if not isinstance(tree, Mapping):
            raise ConfigError(f"operator.yaml: {path or 'the file'} is not a mapping")
        self._tree: Mapping[str, Any] = tree
        self._path = path
        self._known: set[str] = set()

    def raw(self, name: str) -> Any:
        self._known.add(name)
        return self._tree.get(name)

    def part(self, name: str) -> _Part:
        return _Part(self.raw(name), f"{self._path}{name}.")

    def text(self, name: str, default: str) -> str:
        value = self.raw(name)
        if value is None:
            return default
        if isinstance(value, (bool, list, Mapping)):
            raise self._wrong(name, "text")
        return str(value)

    def choice(self, name: str, possible: tuple[str, ...], default: str) -> str:
        value = self.text(name, default)
        if value not in possible:
            raise self._wrong(name, " or ".join(possible))
        return value

    def texts(self, name: str, default: tuple[str, ...]) -> tuple[str, ...]:
        value = self.raw(name)
        if value is None:
            return default
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise self._wrong(name, "a list of texts")
        return tuple(value)

    def number(self, name: str, default: float) -> float:
        value = self.raw(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
            raise self._wrong(name, "a number, 0 or more")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self.raw(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._wrong(name, "true or false")
        return value

    def refuse_unknown(self) -> None:
        unknown = sorted(str(name) for name in set(self._tree) - self._known)
        if unknown:
            raise ConfigError(f"operator.yaml: unknown key {self._path}{unknown[0]}; remove it")

    def _wrong(self, name: str, expected: str) -> ConfigError:
        return ConfigError(
            f"operator.yaml: {self._path}{name} is {self._tree[name]!r}; expected {expected}"
        )
