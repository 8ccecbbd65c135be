"""Runs, boxes and moves: tensors between any two ways of lying on ranks."""
