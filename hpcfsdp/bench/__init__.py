"""Measurements against the peers, in one run: what ``hpcfsdp bench`` prints."""
