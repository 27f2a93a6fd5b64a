"""The world as frozen values: LISTs and the leader's word become `decide.Observed`.

Only `reader` asks anybody; the other modules turn what was got into values and are pure.
"""
