"""One file a model family, in plain PyTorch."""
