"""The life of a unit during a training step: when its parameters are gathered and freed, its gradients reduced."""
