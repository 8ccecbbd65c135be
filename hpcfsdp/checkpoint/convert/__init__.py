"""Checkpoints to and from other formats: safetensors, torch's .pt, folders of torch.distributed.checkpoint."""
