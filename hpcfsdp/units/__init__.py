"""Sharded units: a module, the unit of its parameters, its ranks, and how modules become units."""
