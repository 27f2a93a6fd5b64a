"""What to do about a job, and why. Pure: (observed, now, settings) to a plan.

The control loop and the local runner observe, call this, persist the plan's record, and carry the
plan out. No processes, no cluster, no clock in here.
"""

from backstay_operator.decide.choice import chosen, note_choice
from backstay_operator.decide.conditions import Condition, conditions
from backstay_operator.decide.containers import Restart, StaysEnded, after_end
from backstay_operator.decide.observed import (
    ContainerState,
    Ended,
    JobRecord,
    LeaderFacts,
    Observed,
    PodRecord,
    PodState,
)
from backstay_operator.decide.plan import CreatePod, DeletePod, Outcome, Plan
from backstay_operator.decide.replicas import decide

__all__ = [
    "Condition",
    "ContainerState",
    "CreatePod",
    "DeletePod",
    "Ended",
    "JobRecord",
    "LeaderFacts",
    "Observed",
    "Outcome",
    "Plan",
    "PodRecord",
    "PodState",
    "Restart",
    "StaysEnded",
    "after_end",
    "chosen",
    "conditions",
    "decide",
    "note_choice",
]
