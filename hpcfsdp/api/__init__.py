"""The wrapper that users see, and the policies that choose what becomes a unit."""
