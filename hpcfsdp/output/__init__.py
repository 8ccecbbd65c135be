"""Output of a run: logs, metrics, progress."""
