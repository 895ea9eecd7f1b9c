"""Many configurations at once, and the largest or smallest that fits (docs/reference/sweep.md)."""
