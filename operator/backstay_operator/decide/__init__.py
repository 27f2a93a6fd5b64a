"""What to do about a job, and why. Pure: (observed, now, settings) to a plan.

The control loop and the local runner observe, call this, persist the plan's record, and carry the
plan out. No processes, no cluster, no clock in here.
"""

from backstay_operator.decide.choice import chosen, note_choice
from backstay_operator.decide.conditions import Condition, conditions
from backstay_operator.decide.containers import Restart, StaysEnded, after_end
from backstay_operator.decide.nodes import NodeState, drain_taint, why_lost
from backstay_operator.decide.observed import (
    ContainerState,
    Ended,
    Flushed,
    JobRecord,
    LeaderFacts,
    Observed,
    PodRecord,
    PodState,
    Trouble,
)
from backstay_operator.decide.plan import (
    CreateFlushPod,
    CreatePod,
    DeleteJob,
    DeletePod,
    Flush,
    Outcome,
    Plan,
)
from backstay_operator.decide.replicas import decide

__all__ = [
    "Condition",
    "ContainerState",
    "CreateFlushPod",
    "CreatePod",
    "DeleteJob",
    "DeletePod",
    "Ended",
    "Flush",
    "Flushed",
    "JobRecord",
    "LeaderFacts",
    "NodeState",
    "Observed",
    "Outcome",
    "Plan",
    "PodRecord",
    "PodState",
    "Restart",
    "StaysEnded",
    "Trouble",
    "after_end",
    "chosen",
    "conditions",
    "decide",
    "drain_taint",
    "note_choice",
    "why_lost",
]
