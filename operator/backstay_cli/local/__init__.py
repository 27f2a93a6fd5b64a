"""The local runner: a TrainingJob's pods as process groups and folders of this machine."""
