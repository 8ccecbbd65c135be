"""Tensors that are distributed over ranks: shards, chunks and boxes of them, and moves between distributions."""
