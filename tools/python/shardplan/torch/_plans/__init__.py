# SPDX-License-Identifier: Apache-2.0
"""Plans as documents: how they are made, read, checked and kept on disk."""
