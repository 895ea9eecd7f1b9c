"""Profiles of a training -> a measured report (docs/reference/measured.md)."""
