"""The parts of model and optimizer state that this rank holds, under the names a whole model would use."""
