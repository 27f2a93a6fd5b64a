"""Names in the Kubernetes API that operator, runner, chart and people share.

Conditions and reasons are an interface: none is ever renamed.
"""

from __future__ import annotations

GROUP = "backstay.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "TrainingJob"
PLURAL = "trainingjobs"
CRD_NAME = f"{PLURAL}.{GROUP}"
ANNOTATION_SCHEMA = (
    f"{GROUP}/schema"  # on the CRD; the operator refuses a smaller number than its own
)
SCHEMA_NUMBER = 1

LABEL_JOB = f"{GROUP}/job"
LABEL_REPLICA = f"{GROUP}/replica-index"
LABEL_GENERATION = f"{GROUP}/generation"
LABEL_RUN = f"{GROUP}/run"

TRAINER = "trainer"  # the user's container
SIDECAR = "backstay-sidecar"

# --- conditions: the truth about a job, absent means unknown -----------------------------------
ACCEPTED = "Accepted"
RUNNING = "Running"
RESTORING = "Restoring"
DURABLE = "Durable"
DEGRADED = "Degraded"
SUCCEEDED = "Succeeded"
FAILED = "Failed"
SUSPENDED = "Suspended"
CONDITIONS = (ACCEPTED, RUNNING, RESTORING, DURABLE, DEGRADED, SUCCEEDED, FAILED, SUSPENDED)

# --- reasons: of Accepted ------------------------------------------------------------------------
REASON_ACCEPTED = "Accepted"
REASON_INVALID = "Invalid"  # the manifest is wrong
REASON_NOT_ALLOWED = "NotAllowed"  # an administrator's allow-list stands against it
REASON_NOT_SUPPORTED_YET = "NotSupportedYet"  # of older versions: a field that they can't do
REASON_CHANGE_REFUSED = "ChangeRefused"  # a field that can't change on a running job did

# --- reasons: pods that can't be made or placed --------------------------------------------------
REASON_HOST_PATH_FORBIDDEN = "HostPathForbidden"  # Pod Security of the namespace
REASON_POD_REFUSED = "PodRefused"  # by another admission rule of the cluster
REASON_QUOTA_EXCEEDED = "QuotaExceeded"
REASON_MEMORY_TOO_SMALL = "MemoryTooSmall"
REASON_UNSCHEDULABLE = "Unschedulable"
REASON_QUEUED = "Queued"  # a scheduling gate: no failure
REASON_IMAGE_PULL_FAILED = "ImagePullFailed"
REASON_VOLUME_FAILED = "VolumeFailed"  # a volume or claim that can't be mounted

# --- reasons: running, coming back ---------------------------------------------------------------
REASON_FIRST_PODS = "FirstPods"
REASON_CREATION_UNFINISHED = "CreationUnfinished"
REASON_RESTORE_CHOSEN = "RestoreChosen"
REASON_TEMPLATE_CHANGED = "TemplateChanged"
REASON_TOKEN_CHANGED = "TokenChanged"  # pods go by another one than the job's Secret
REASON_NODE_LOST = "NodeLost"
REASON_DRAINING = "Draining"
REASON_DRAIN_TOO_SLOW = "DrainTooSlow"  # the hold ran out before all was safe
REASON_EVICTED = "Evicted"
REASON_OOM_KILLED = "OOMKilled"
REASON_HANG = "Hang"
REASON_USER_ERROR = "UserError"  # the training script's own failure
REASON_POD_GONE = "PodGone"
REASON_POD_FAILED = "PodFailed"
REASON_PROCESS_ENDED = "ProcessEnded"  # of a recovery: ranks began again in place
REASON_CONTAINER_ENDED = "ContainerEnded"  # of a recovery: a trainer's container started again
REASON_PEER_FAILED_AFTER_END = "PeerFailedAfterEnd"
REASON_ALL_TRAINING = "AllReplicasTraining"
REASON_NO_STEPS = "NoStepMade"  # the ranks start again, do something else, or hang
REASON_WAITING = "WaitingForReplicas"  # pods are not up
REASON_WAITING_FOR_RANKS = "WaitingForRanks"  # pods run, ranks have not called restore()
REASON_RESTORING = "Restoring"
REASON_NOT_RESTORING = "NotRestoring"
REASON_FINISHING = "Finishing"  # all ranks have come to their end
REASON_OUTRANKED = "NewerAttemptExists"  # than the pods' own: one gets a greater generation
REASON_SUSPENDED = "SuspendedByUser"

# --- reasons: of Durable and Degraded ------------------------------------------------------------
REASON_COMMITTED = "Committed"
REASON_NONE_YET = "NoneYet"
REASON_NO_REMOTE_TIER = "NoRemoteTier"
REASON_ALL_TIERS_WELL = "AllTiersWell"
REASON_TIER_TROUBLE = "TierTrouble"
REASON_NO_NEIGHBOR = "NoNeighborInOtherDomain"
REASON_LIBRARY_MISSING = "LibraryMissing"  # ranks run, but none ever spoke to its sidecar
REASON_SAVES_SKIPPED = "SavesSkipped"  # mostly: the memory volume is too small
REASON_BUCKET_REFUSED = "BucketRefused"  # keys, no such bucket, no conditional writes: mend it
REASON_BUCKET_UNREACHABLE = "BucketUnreachable"  # it may pass by itself
REASON_RUN_OWNED_ELSEWHERE = "RunOwnedElsewhere"
REASON_GRACE_TOO_SHORT = "GraceTooShort"
REASON_FOREIGN_BUDGET = "ForeignDisruptionBudget"  # a second PDB makes evictions answer 500

# --- reasons: of the end -------------------------------------------------------------------------
REASON_ALL_COMPLETED = "AllReplicasCompleted"
REASON_NOT_DURABLE = "CompletedNotDurable"
REASON_LEADER_GAVE_UP = "RestoreFailed"
REASON_EARLY_DEATHS = "DiesBeforeItJoins"
