"""Measurements of m2flow beside its peers. `python -m benchmarks` runs them; README.md says what each means."""
