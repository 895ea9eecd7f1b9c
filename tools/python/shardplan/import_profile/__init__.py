# SPDX-License-Identifier: Apache-2.0
"""Profiles of a training -> a measured report (docs/reference/measured.md)."""
