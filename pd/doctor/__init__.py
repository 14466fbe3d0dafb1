"""Says whether this machine will serve, and how fast, before it does: `pd doctor`."""
