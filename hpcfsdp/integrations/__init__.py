"""Strategies and subclasses with which other libraries train through hpcfsdp. Each module imports one library."""
