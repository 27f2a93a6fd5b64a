"""What a TrainingJob says: types, reading with messages for people, names of labels and reasons.

Pure: no I/O, no clock. Used by the builders, the decisions, the control loop and the command.
"""

from backstay_operator.api.allow import Allowances, RemoteAllowance, read_allowances
from backstay_operator.api.job import (
    LAUNCHERS,
    CheckpointSpec,
    FailurePolicy,
    JobSpec,
    LocalSpec,
    MemorySpec,
    NeighborSpec,
    RemoteSpec,
    TrainingJob,
)
from backstay_operator.api.memory import MemoryNeed, memory_need, memory_too_small
from backstay_operator.api.read import read_job
from backstay_operator.api.section import InvalidJob, Problem

__all__ = [
    "LAUNCHERS",
    "Allowances",
    "CheckpointSpec",
    "FailurePolicy",
    "InvalidJob",
    "JobSpec",
    "LocalSpec",
    "MemoryNeed",
    "MemorySpec",
    "NeighborSpec",
    "Problem",
    "RemoteAllowance",
    "RemoteSpec",
    "TrainingJob",
    "memory_need",
    "memory_too_small",
    "read_allowances",
    "read_job",
]
