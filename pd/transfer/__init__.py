"""KV-cache transfer between any two shapes. Knows no request."""
