"""Measures a transfer backend between two processes, on one host or two, and compares what arrived."""
