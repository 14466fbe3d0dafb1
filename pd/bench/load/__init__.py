"""Load on a server: what is asked, when, and what came of it."""
