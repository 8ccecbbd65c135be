"""Runs, boxes and moves: tensors brought from one distribution over ranks to another."""
