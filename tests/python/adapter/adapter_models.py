# SPDX-License-Identifier: Apache-2.0
"""adapter_models:CASE, for `shardplan trace`: the model of each case in adapter_cases."""

import functools

from adapter_cases import CASES, make_model

for _name, _case in CASES.items():
    globals()[_name] = functools.partial(make_model, _case)
