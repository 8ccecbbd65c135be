"""What ranks do when a job hangs: their last events, their Python stacks, and a report that says who waits for whom."""
