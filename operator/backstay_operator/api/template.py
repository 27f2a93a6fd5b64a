"""The pod template: what a user may say there, and what Backstay says itself.

The operator makes pods on a user's behalf, so what would let a job out of its box (host namespaces,
privileged containers, other service accounts, host paths) is refused here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from backstay_operator.api.allow import Allowances, not_allowed
from backstay_operator.api.job import TORCHRUN
from backstay_operator.api.names import SIDECAR, TRAINER
from backstay_operator.api.quantity import parse_quantity
from backstay_operator.api.section import Section, show
from backstay_protocol.names import (
    ENV_POD,
    ENV_REPLICA,
    ENV_TOKEN,
    ENV_TOPOLOGY,
    ENV_VOLUME,
)

_EXAMPLE = "`podTemplate: {spec: {containers: [{name: trainer, command: [torchrun, train.py]}]}}`"
_OWN_POD_FIELDS = {
    "hostname": "pods get a stable one of their own",
    "subdomain": "it is the job's headless Service",
    "restartPolicy": "it is always OnFailure",
}
_HOST_FIELDS = ("hostNetwork", "hostPID", "hostIPC")
_OWN_VOLUMES = "backstay-"
# fields whose shape the builders of pods rely on
_LISTS = ("tolerations", "imagePullSecrets", "schedulingGates", "topologySpreadConstraints")
_MAPPINGS = ("affinity", "securityContext", "nodeSelector")
_ACCOUNT_FIELDS = ("serviceAccountName", "serviceAccount")
# what Pod Security's level `baseline` lets a container add
_HARMLESS_CAPABILITIES = frozenset(
    {
        *("AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD"),
        *("NET_BIND_SERVICE", "SETFCAP", "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT"),
    }
)
OWN_ENV = frozenset({ENV_VOLUME, ENV_REPLICA, ENV_TOPOLOGY, ENV_POD, ENV_TOKEN})
LAUNCHER_ENV = frozenset(
    {
        *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
        *("PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR"),
        *("PET_MASTER_PORT", "PET_RDZV_BACKEND", "PET_RDZV_ID", "PET_RDZV_ENDPOINT"),
        *("PET_RDZV_CONF", "PET_LOCAL_ADDR", "PET_MAX_RESTARTS"),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE",
    }
)
_OWN_FLAGS = frozenset(
    {
        *("--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf", "--nnodes"),
        *("--nproc-per-node", "--node-rank", "--master-addr", "--master-port", "--local-addr"),
        *("--max-restarts", "--standalone"),
    }
)


def read_template(spec: Section, launcher: str, allow: Allowances) -> dict[str, Any]:
    """Check the template; return it as it is (a stand-in where it is unusable)."""
    template = spec.required_section("podTemplate", _EXAMPLE)
    if not template.good(""):
        return {"spec": {"containers": []}}
    metadata = template.section("metadata")
    if metadata is not None:
        _check_texts(metadata, "labels")
        _check_texts(metadata, "annotations")
        metadata.refuse_unknown()
    pod = template.required_section("spec", _EXAMPLE)
    _check_pod(pod, allow)
    _check_containers(pod, launcher, allow)
    template.refuse_unknown()
    return {"metadata": template.raw("metadata") or {}, "spec": template.raw("spec") or {}}


def _check_pod(pod: Section, allow: Allowances) -> None:
    for field, why in _OWN_POD_FIELDS.items():
        value = pod.raw(field)
        if value is not None and value != "OnFailure":
            pod.problem(field, f"is Backstay's to set ({why}); remove it")
    for field in _HOST_FIELDS:
        if pod.raw(field):
            not_allowed(pod, field, allow.refuses_privilege())
    for field in _ACCOUNT_FIELDS:
        account = pod.raw(field)
        if account not in (None, ""):
            not_allowed(pod, field, allow.refuses_service_account(str(account)))
    _check_volumes(pod, allow)
    for index, container in enumerate(pod.sections("initContainers")):
        _check_any_container(container, allow)
        if container.raw("restartPolicy") == "Always":
            pod.problem(
                f"initContainers[{index}]",
                "is a native sidecar, and a pod may have exactly one, Backstay's; make it a normal "
                "container",
            )
    if pod.raw("ephemeralContainers"):
        pod.problem("ephemeralContainers", "can't be in a template; remove it")
    _check_resources(pod)
    for field in _LISTS:
        pod.sections(field)
    for field in _MAPPINGS:
        inner = pod.section(field)
        if inner is not None and field == "affinity":
            inner.section("nodeAffinity")


def _check_texts(section: Section, name: str) -> None:
    inner = section.section(name)
    for key in inner.names() if inner is not None else ():
        assert inner is not None
        value = inner.raw(key)
        if not isinstance(value, str):
            inner.problem(key, f'got {show(value)}; expected a string; write `{key}: "{value}"`')


def _check_volumes(pod: Section, allow: Allowances) -> None:
    for volume in pod.sections("volumes"):
        _check_not_ours(volume)
        volume.section("emptyDir")
        folder = volume.raw("hostPath")
        if folder is not None:
            path = str(folder.get("path") if isinstance(folder, Mapping) else folder)
            not_allowed(volume, "hostPath", allow.refuses_host_path(path))


def _check_not_ours(section: Section) -> None:
    """Volumes of ours hold what belongs to the sidecar."""
    if str(section.raw("name")).startswith(_OWN_VOLUMES):
        section.problem(
            "name", f"names with {_OWN_VOLUMES} are Backstay's own volumes; choose another"
        )


def _check_containers(pod: Section, launcher: str, allow: Allowances) -> None:
    containers = pod.raw("containers")
    if not isinstance(containers, list) or not all(isinstance(c, Mapping) for c in containers):
        if pod.good("") and pod.path:
            pod.wrong("containers", f"a list with a container named {TRAINER}", _EXAMPLE)
        return
    names = [container.get("name") for container in containers]
    if names.count(TRAINER) != 1:
        shown = ", ".join(str(name) for name in names) or "none"
        pod.problem(
            "containers",
            f"got {shown}; expected exactly one container named {TRAINER}; write `- name: trainer`",
        )
    for container, inner in zip(containers, pod.sections("containers"), strict=True):
        _check_any_container(inner, allow)
        if container.get("name") == TRAINER:
            _check_trainer(inner, container, launcher)


def _check_any_container(section: Section, allow: Allowances) -> None:
    if section.raw("name") == SIDECAR:
        section.problem("name", f"{SIDECAR} is Backstay's own container; choose another name")
    if allow.cluster and not section.raw("image"):
        section.wrong("image", "an image", "`image: registry.example.org/my-trainer:1`")
    for mount in section.sections("volumeMounts"):
        _check_not_ours(mount)
    section.section("lifecycle")
    _check_rights(section, allow.refuses_privilege())


def _check_rights(section: Section, why: str) -> None:
    security = section.section("securityContext")
    if security is not None:
        if security.raw("privileged"):
            not_allowed(security, "privileged", why)
        if security.raw("procMount") not in (None, "Default"):
            not_allowed(security, "procMount", why)
        capabilities = security.section("capabilities")
        added = capabilities.raw("add") if capabilities is not None else None
        if added and not (
            isinstance(added, list) and {str(name) for name in added} <= _HARMLESS_CAPABILITIES
        ):
            not_allowed(security, "capabilities.add", why)
    if any(port.raw("hostPort") for port in section.sections("ports")):
        not_allowed(section, "ports", why and f"hostPort {why}")


def _check_trainer(section: Section, container: Mapping[str, Any], launcher: str) -> None:
    words = [*_words(section, container, "command"), *_words(section, container, "args")]
    if not container.get("command") and not container.get("args") and not container.get("image"):
        section.wrong("command", "the training command", "`command: [torchrun, train.py]`")
    if launcher == TORCHRUN:
        _check_flags(section, words)
    _check_env(section, container)
    _check_resources(section)
    directory = container.get("workingDir")
    if directory is not None and not isinstance(directory, str):
        section.wrong("workingDir", "a folder", "`workingDir: .`")


def _words(section: Section, container: Mapping[str, Any], name: str) -> list[str]:
    value = container.get(name)
    if value is None:
        return []
    if isinstance(value, list) and all(isinstance(word, str) for word in value):
        return value
    section.wrong(name, "a list of strings (quote numbers)", f'`{name}: ["torchrun", "train.py"]`')
    return []


def _check_flags(section: Section, words: list[str]) -> None:
    for word in words:
        if word == "-m" or word.endswith(".py"):
            return  # what follows belongs to the user's program
        flag = word.partition("=")[0].replace("_", "-")
        if flag in _OWN_FLAGS:
            section.problem(
                "command",
                f"got {flag}, which would override what Backstay tells torchrun by environment; "
                "remove it (replicas and processesPerReplica say the size)",
            )


def _check_env(section: Section, container: Mapping[str, Any]) -> None:
    env = container.get("env")
    if env is None:
        return
    if not isinstance(env, list) or not all(map(_is_named, env)):
        section.wrong("env", "a list of name and value", "`env: [{name: SEED, value: '1'}]`")
        return
    for index, entry in enumerate(env):
        name = entry["name"]
        if name in OWN_ENV or name in LAUNCHER_ENV:
            section.problem(f"env[{index}]", f"{name} is Backstay's to set; remove it")
        elif "valueFrom" not in entry and not isinstance(entry.get("value", ""), str):
            section.problem(
                f"env[{index}].value",
                f'got {entry["value"]}; expected a string; write `value: "{entry["value"]}"`',
            )


def _is_named(entry: object) -> bool:
    return isinstance(entry, Mapping) and isinstance(entry.get("name"), str) and entry["name"] != ""


def _check_resources(section: Section) -> None:
    resources = section.section("resources")
    for group in ("requests", "limits"):
        amounts = resources.section(group) if resources is not None else None
        for name in amounts.names() if amounts is not None else ():
            assert amounts is not None
            amount = amounts.raw(name)
            if parse_quantity(amount) is None:
                amounts.problem(
                    name, f"got {amount!r}; expected a quantity; write for example `{name}: 2`"
                )
