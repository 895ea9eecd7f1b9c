# SPDX-License-Identifier: Apache-2.0
"""State dicts of FSDP1 and checkpoints on disk."""
