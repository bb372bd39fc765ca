"""The compute side of pdq: models, KV slots, sampling. Knows nothing of Redis; `base` alone is free of torch."""
