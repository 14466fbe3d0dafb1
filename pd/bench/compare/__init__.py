"""Servers of equal resources under the same traffic, one after the other."""
