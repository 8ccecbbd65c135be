"""Plans of a training before it runs: memory, traffic, time and checkpoints of a model on imagined ranks.

Everything is arithmetic on the layouts that the engine itself uses. A model is traced once, on the meta device; no
rank is started, and no rank is visited.
"""
