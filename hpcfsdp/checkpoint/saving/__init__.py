"""Saves: what a file will contain, who writes which bytes, and how it appears whole or not at all."""
