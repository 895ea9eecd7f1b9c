"""Trains a PyTorch model by replaying a shardplan plan.

    import shardplan.torch as sp

    model = sp.apply(model, "plan.json", mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    for batch in data:
        loss = model(batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""

from ._apply import apply, load_plan
from ._errors import PlanError

__all__ = ["PlanError", "apply", "load_plan"]
