"""Text and files that may come from others, for terminals and as JSON; quantities in words."""
