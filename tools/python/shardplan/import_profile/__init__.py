"""Profiles of a training -> a measured report (docs/measured.md)."""
