# SPDX-License-Identifier: Apache-2.0
"""All cases of off_plan.py."""

import off_plan_changes  # noqa: F401
import off_plan_checkpoints  # noqa: F401
import off_plan_loops  # noqa: F401
import off_plan_models_used  # noqa: F401
import off_plan_steps  # noqa: F401
