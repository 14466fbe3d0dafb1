"""Shells: one file a kind of process."""
