"""What a run tells: logs, metrics, progress."""
