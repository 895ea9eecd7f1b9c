# SPDX-License-Identifier: Apache-2.0
"""`shardplan rehearse`: anybody's training script at full size without a GPU (docs/reference/rehearse.md)."""
