"""The checkpoints of a training in one folder: saved, kept, removed and loaded."""
