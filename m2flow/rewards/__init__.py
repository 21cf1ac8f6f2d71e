"""Rewards. Each file adapts one way of scoring to `m2flow.protocols.Reward` and is imported by registry name."""
