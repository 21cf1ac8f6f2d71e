"""What trains and keeps weights: torch, and checkpoints."""
