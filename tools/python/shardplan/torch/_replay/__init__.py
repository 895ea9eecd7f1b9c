# SPDX-License-Identifier: Apache-2.0
"""An applied plan: its runtime, the hooks in the model, and the plans that it follows after a step that deviates."""
