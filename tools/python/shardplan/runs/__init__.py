# SPDX-License-Identifier: Apache-2.0
"""Training runs that were measured: predicted next to measured, and few figures of a cluster fitted to them
(docs/reference/cost.md)."""
