"""What a TrainingJob says: types, reading with messages for people, names of labels and reasons.

Pure: no I/O, no clock. Used by the builders, the decisions, the control loop and the command.
"""

from backstay_operator.api.job import (
    LAUNCHERS,
    CheckpointSpec,
    JobSpec,
    LocalSpec,
    MemorySpec,
    NeighborSpec,
    RemoteSpec,
    TrainingJob,
)
from backstay_operator.api.read import read_job
from backstay_operator.api.section import InvalidJob, Problem

__all__ = [
    "LAUNCHERS",
    "CheckpointSpec",
    "InvalidJob",
    "JobSpec",
    "LocalSpec",
    "MemorySpec",
    "NeighborSpec",
    "Problem",
    "RemoteSpec",
    "TrainingJob",
    "read_job",
]
