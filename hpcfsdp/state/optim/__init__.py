"""Optimizer state under the names of a whole model's parameters: gathered, rekeyed, scattered, loaded, kept in files.

``keys`` says which parameter of the model stands where in an optimizer. ``local`` is what this rank has, the source of
``save`` (state dicts) and ``in_file`` (checkpoints); ``compare`` has ranks agree on it. ``plan`` says what a rank will
have, from a state dict (``load``) or a checkpoint (``in_file``). ``rekey`` turns names into numbers and back.
"""
