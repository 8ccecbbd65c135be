"""The bytes of a checkpoint file, as docs/reference/checkpoint-format.md specifies them. Touch no disk."""
