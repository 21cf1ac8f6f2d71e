"""Training in one torch process."""
