"""The serving system: brains, wire, engine, front and the processes around them."""
