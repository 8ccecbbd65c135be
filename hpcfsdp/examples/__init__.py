"""Programs as users of the package write them: they use its public names alone."""
