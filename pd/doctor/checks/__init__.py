"""The checks, a file a subject. Each file ends in CHECKS, in the order people read them."""
