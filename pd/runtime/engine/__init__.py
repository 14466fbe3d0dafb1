"""The torch side of a rank: model, KV pool, step runner, sampler."""
