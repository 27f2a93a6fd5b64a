"""Taking secrets out of what is handed on. Pure.

Three nets: values that are known to be secret (tokens, keys of Secrets), names that look like a
secret's (environment, `NAME=value` in text), and forms that are one by themselves (bearer headers,
signatures of presigned URLs, AWS key ids). What looks like a secret is masked, be it one or not.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from backstay_protocol.loglines import MASK, mask_signatures

_SHORTEST = 6
"""A known secret that is shorter would mask ordinary words."""
_NAME = (
    r"(?:TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|API[_-]?KEY|ACCESS[_-]?KEY(?:[_-]?ID)?"
    r"|PRIVATE[_-]?KEY|CREDENTIALS?|AUTH)"
)
_SECRET_NAME = re.compile(rf"(?:^|[_.-]|(?<=[a-z])){_NAME}S?(?:$|[_.-])", re.IGNORECASE)
_CAMEL_NAME = re.compile(r"(?:access|secret|api|private)Key$|(?:Token|Secret|Password)$")
_ASSIGNED = re.compile(
    rf"""(?P<name>[\w.-]*{_NAME})(?P<sign>["']?\s*[=:]\s*["']?)(?P<value>[^\s"'&,;]+)""",
    re.IGNORECASE,
)
_NAMED = re.compile(
    rf"""(?P<name>name["']?\s*:\s*["']?(?P<of>[\w.-]*{_NAME}[\w.-]*)["']?\s*,?\s*)"""
    r"""(?P<sign>["']?value["']?\s*:\s*["']?)(?P<value>[^\s"',}}]+)""",
    re.IGNORECASE,
)
"""An entry of `env` in YAML or JSON that stands in a text."""
_NUMBER = re.compile(r"[+-]?[\d.,]+(?:e[+-]?\d+)?%?", re.IGNORECASE)
_FORMS = (
    re.compile(r"(?i)(?<=bearer )[A-Za-z0-9._~+/=-]{8,}"),
    re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"),
    re.compile(r"(?<=://)[^/\s:@\"']+:[^/\s:@\"']+(?=@)"),
    re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?-----END [A-Z ]*PRIVATE KEY-----", re.DOTALL),
)
_NEVER = frozenset({"managedFields", "kubectl.kubernetes.io/last-applied-configuration"})
"""Long, or a copy of what is there already."""
_DATA_OF_SECRETS = ("data", "stringData")


class Masker:
    """Masks with the secrets that are known so far."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        """`secrets`: values that must not be handed on."""
        self._known: set[str] = set()
        self.know(*secrets)

    def know(self, *secrets: str) -> None:
        """These are secret, too, and what they are in base64."""
        for secret in secrets:
            if len(secret) >= _SHORTEST:
                self._known |= {secret, base64.b64encode(secret.encode()).decode()}

    def text(self, text: str) -> str:
        """A log, a message, a rendered file."""
        for secret in sorted(self._known, key=len, reverse=True):
            text = text.replace(secret, MASK)
        for form in _FORMS:
            text = form.sub(MASK, text)
        text = mask_signatures(text)
        return _ASSIGNED.sub(_masked, _NAMED.sub(_masked_entry, text))

    def tree(self, tree: Any) -> Any:
        """Values of JSON: environment by its names, data of Secrets, all texts as `text`."""
        if isinstance(tree, Mapping):
            return self._mapping(tree)
        if isinstance(tree, list | tuple):
            return self._sequence(tree)
        return self.text(tree) if isinstance(tree, str) else tree

    def _sequence(self, items: Sequence[Any]) -> list[Any]:
        """What follows an option like `--api-key` in a command is masked, too."""
        found, after = [], ""
        for item in items:
            word = isinstance(item, str)
            masked = word and after.startswith("-") and looks_secret(after.lstrip("-"))
            found.append(MASK if masked else self.tree(item))
            after = item if word else ""
        return found

    def _mapping(self, tree: Mapping[str, Any]) -> dict[str, Any]:
        is_secret = tree.get("kind") == "Secret"
        found: dict[str, Any] = {}
        for name, value in tree.items():
            if name in _NEVER:
                continue
            if is_secret and name in _DATA_OF_SECRETS and isinstance(value, Mapping):
                found[name] = dict.fromkeys(value, MASK)
            elif isinstance(value, str) and value and looks_secret(name):
                found[name] = MASK
            else:
                found[name] = self.tree(value)
        named = tree.get("name")  # an entry of `env`, or the like
        if isinstance(named, str) and isinstance(tree.get("value"), str) and looks_secret(named):
            found["value"] = MASK
        return found


def looks_secret(name: str) -> bool:
    """Whether what has this name is likely a secret. Names of Secrets (`credentialsSecret`,
    `secretName`) are none.
    """
    if name in ("credentialsSecret", "caSecret", "secretName"):
        return False
    return bool(_SECRET_NAME.search(name) or _CAMEL_NAME.search(name))


def _masked_entry(found: re.Match[str]) -> str:
    return f"{found['name']}{found['sign']}{MASK}" if looks_secret(found["of"]) else found[0]


def _masked(found: re.Match[str]) -> str:
    value = found["value"]
    if value == MASK or _NUMBER.fullmatch(value) or not looks_secret(found["name"]):
        return found[0]
    return f"{found['name']}{found['sign']}{MASK}"
