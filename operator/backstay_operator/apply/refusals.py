"""What the API server says no with, as a reason and a sentence that says what to do. Pure."""

from __future__ import annotations

from backstay_operator.api import names
from backstay_operator.decide import Trouble


def trouble_of(words: str) -> Trouble:
    """`words`: the API server's own, of a pod or an object that was refused."""
    for check in (_pod_security, _quota, _volume):
        found = check(words)
        if found is not None:
            return found
    return Trouble(reason=names.REASON_POD_REFUSED, message=words)


def _pod_security(words: str) -> Trouble | None:
    if "violates PodSecurity" not in words:
        return None
    if "hostPath" in words:
        message = (
            f"{words}; the namespace's Pod Security level forbids hostPath: write "
            "`spec.checkpoint.local.volume: pvc`, `ephemeral` or `none`, or have an administrator "
            "label the namespace pod-security.kubernetes.io/enforce=privileged"
        )
        return Trouble(reason=names.REASON_HOST_PATH_FORBIDDEN, message=message)
    return Trouble(
        reason=names.REASON_POD_REFUSED,
        message=f"{words}; set the securityContext that it asks for in spec.podTemplate",
    )


def _quota(words: str) -> Trouble | None:
    if "exceeded quota" not in words and "must specify limits" not in words:
        return None
    message = f"{words}; it is tried again until there is room"
    return Trouble(reason=names.REASON_QUOTA_EXCEEDED, message=message)


def _volume(words: str) -> Trouble | None:
    if "PersistentVolumeClaim" not in words and "persistentvolumeclaims" not in words:
        return None
    return Trouble(reason=names.REASON_VOLUME_FAILED, message=words)
