"""Optimizer state under the names of a whole model's parameters: gathered, rekeyed, scattered, loaded, kept in files.

``keys`` says which parameter of the model stands where in an optimizer, and turns names into numbers and back.
``LocalOptimState`` (``save``) is what this rank has, for state dicts and checkpoints (``in_file``); ``compare`` has
ranks agree on it. ``load_plan`` says what a rank will have, from a state dict (``load``) or a checkpoint (``in_file``).
"""
