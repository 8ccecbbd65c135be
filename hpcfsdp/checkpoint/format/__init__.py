"""What a checkpoint file is, byte by byte, as docs/checkpoint-format.md specifies it. Touches no disk."""
