# SPDX-License-Identifier: Apache-2.0
"""Many configurations at once, and the largest or smallest that fits (docs/reference/sweep.md)."""
