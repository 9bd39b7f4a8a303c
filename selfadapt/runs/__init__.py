"""Runs that may be killed at any moment: their folders, and how processes share them."""

from selfadapt.runs.store import WHOLE, RunStore, Shard

__all__ = ["WHOLE", "RunStore", "Shard"]
