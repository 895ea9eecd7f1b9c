# SPDX-License-Identifier: Apache-2.0
"""Sharded parameters: FSDP2's layout, FSDP1's flat parameters, extensions, and activations that are offloaded."""
