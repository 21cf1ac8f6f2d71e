"""Policies: one file each, loaded by registry name."""
