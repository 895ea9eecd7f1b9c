"""What a user does that a plan does not have ends as under real FSDP2 or FSDP1, bit for bit, or with a message that names the way out
(off_plan.py prints the table)."""

import off_plan
import off_plan_all  # noqa: F401, all cases
import pytest
from conftest import build_folder
from off_plan_wrong import WRONG


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(build_folder() / "bin"), prepend=":")
        return off_plan.run_all(list(off_plan.CASES), tmp_path_factory.mktemp("off_plan"), build_folder())


@pytest.mark.parametrize("name", off_plan.CASES)
def test_case(results, name):
    case, result = off_plan.CASES[name], results[name]
    assert result["torch"]["what"] in ("runs", "raises", "hangs"), result["torch"]
    wrong = {kind: said for kind, said in off_plan.verdicts(case, result).items() if said}
    unknown = {kind: said for kind, said in wrong.items() if kind not in WRONG.get(name, ())}
    assert not unknown, f"{name}: {unknown}"
    mended = [kind for kind in WRONG.get(name, ()) if kind not in wrong]
    assert not mended, f"{name}: mended: take {mended} out of off_plan_wrong.py"
