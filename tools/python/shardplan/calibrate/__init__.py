# SPDX-License-Identifier: Apache-2.0
"""Measures what a cluster document says of the machine at hand (docs/reference/calibrate.md)."""
