"""Layers, sizes, texts and start-up cost, kept by tests."""
