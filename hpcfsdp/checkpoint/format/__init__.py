"""The bytes of a checkpoint file, as docs/checkpoint-format.md specifies them. Touches no disk."""
