"""One script a contender: the same model, data, batch, seed and threads, each trained by another loop."""
