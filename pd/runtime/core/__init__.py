"""Pure brains: events in, effects out. No torch, no I/O, no clock, no dice."""
