"""Our own batched decoder for causal language models of transformers, a Generator."""
