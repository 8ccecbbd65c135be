"""Optimizer state under the names of a whole model's parameters: gathered, rekeyed, scattered, loaded.

``keys`` says which parameter of the model stands where in an optimizer; ``compare`` has ranks agree on what they have;
``gather`` brings the state of one flat parameter together and ``unflatten`` gives it the names and shapes of the model;
``flatten`` and ``scatter`` are the way back; ``rekey`` turns names into numbers and numbers into names; ``save`` and
``load`` are the whole ways.
"""
