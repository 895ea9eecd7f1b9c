# SPDX-License-Identifier: Apache-2.0
"""Muon by a plan's exchanges: the layout of what is exchanged, the plan's program, and the optimizer."""
