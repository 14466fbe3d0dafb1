"""Our router alone: between clients that read and instances that compute nothing."""
