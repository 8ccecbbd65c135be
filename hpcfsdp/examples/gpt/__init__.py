"""Trains a byte-level GPT on files. ``hpcfsdp train`` runs it; read it as a start for a program of your own.

``loop`` is the program. Everything it imports of hpcfsdp is public.
"""
