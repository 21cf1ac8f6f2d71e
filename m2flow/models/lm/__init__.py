"""Causal language models of transformers as policies: packed scoring, LoRA, their tokenizers, and their export."""
