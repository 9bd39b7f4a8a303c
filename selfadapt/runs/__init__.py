"""Runs that may be killed at any moment: their folders, and sharing by several processes."""

from selfadapt.runs.store import WHOLE, RunStore, Shard

__all__ = ["WHOLE", "RunStore", "Shard"]
