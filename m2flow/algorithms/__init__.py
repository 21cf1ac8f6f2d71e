"""Algorithms as pure functions, and the objectives made of them. Nothing here loops, steps or divides a loss."""
