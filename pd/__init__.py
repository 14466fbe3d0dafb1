"""Prefill/decode-disaggregated serving of large language models in pure PyTorch and Triton."""

__version__ = "0.1.0"
