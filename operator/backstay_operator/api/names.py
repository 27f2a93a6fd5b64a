"""Names in the Kubernetes API that operator, runner, chart and people share."""

from __future__ import annotations

GROUP = "backstay.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "TrainingJob"

LABEL_JOB = f"{GROUP}/job"
LABEL_REPLICA = f"{GROUP}/replica-index"
LABEL_GENERATION = f"{GROUP}/generation"
LABEL_RUN = f"{GROUP}/run"

TRAINER = "trainer"  # the user's container
SIDECAR = "backstay-sidecar"

# --- conditions: the truth about a job, absent means unknown -----------------------------------
RUNNING = "Running"
RESTORING = "Restoring"
DURABLE = "Durable"
DEGRADED = "Degraded"
SUCCEEDED = "Succeeded"
FAILED = "Failed"
SUSPENDED = "Suspended"
CONDITIONS = (RUNNING, RESTORING, DURABLE, DEGRADED, SUCCEEDED, FAILED, SUSPENDED)

# --- reasons -------------------------------------------------------------------------------------
REASON_FIRST_PODS = "FirstPods"
REASON_CREATION_UNFINISHED = "CreationUnfinished"
REASON_NODE_LOST = "NodeLost"
REASON_POD_GONE = "PodGone"
REASON_POD_FAILED = "PodFailed"
REASON_PEER_FAILED_AFTER_END = "PeerFailedAfterEnd"
REASON_ALL_COMPLETED = "AllReplicasCompleted"
REASON_NOT_DURABLE = "CompletedNotDurable"
REASON_LEADER_GAVE_UP = "RestoreFailed"
REASON_EARLY_DEATHS = "DiesBeforeItJoins"
REASON_SUSPENDED = "SuspendedByUser"
REASON_ALL_TRAINING = "AllReplicasTraining"
REASON_WAITING = "WaitingForReplicas"
