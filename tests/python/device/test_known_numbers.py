# SPDX-License-Identifier: Apache-2.0
"""Numbers that the host reads on a device on which nothing computes (device/kernels/numbers.h,
device/nccl/played.h)."""

import subprocess
import sys

from conftest import ROOT, on_device


def test_small_numbers_are_real_and_peers_are_played():
    done = on_device([sys.executable, str(ROOT / "tests" / "python" / "device" / "known_numbers.py")], "null")
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["all", "checks", "hold"]


def test_a_histogram_of_experts_is_followed(tmp_path):
    (tmp_path / "histogram.csv").write_text("4,2,1,1\n0,0,0,0\n")
    program = """
import torch
torch.cuda.device_count()
experts = torch.randn(8192, 8, device="cuda").topk(2, -1).indices
assert all(len(set(row)) == 2 for row in experts.tolist())
print(torch.bincount(experts.flatten(), minlength=8).tolist(), torch.randn(8192, 4, \
device="cuda").argmax(-1).bincount().tolist())
"""
    done = on_device([sys.executable, "-c", program], "null", SHARDPLAN_DEVICE_ROUTING=str(tmp_path / "histogram.csv"))
    assert done.returncode == 0, done.stderr[-3000:]
    # Two of a token's experts: expert 0 can have every token at most. Other numbers of experts are balanced.
    assert done.stderr.count("a choice among 4 is balanced: the routing has 8 shares") == 1
    assert done.stdout.strip() == "[8192, 4096, 2048, 2048, 0, 0, 0, 0] [2048, 2048, 2048, 2048]"


def test_a_histogram_without_numbers_is_refused(tmp_path):
    (tmp_path / "histogram.csv").write_text("expert,tokens\n")
    program = "import torch; torch.randn(8192, 8, device='cuda').topk(2, -1)"
    done = on_device([sys.executable, "-c", program], "null", SHARDPLAN_DEVICE_ROUTING=str(tmp_path / "histogram.csv"))
    assert done.returncode == 2
    assert "histogram.csv: expected numbers of at least 0, not all 0" in done.stderr


def test_extensions_launch_through_the_runtime_or_are_named(tmp_path):
    """One launches a kernel by the runtime that the process has; the other has the runtime inside."""
    (tmp_path / "extension.c").write_text(
        """
typedef struct { unsigned x, y, z; } dim3;
int cudaLaunchKernel(const void*, dim3, dim3, void**, unsigned long, void*);
void __cudaRegisterFunction(void**, const char*, char*, const char*, int, void*, void*, void*, void*, int*);
int cuGetExportTable(const void**, const void*);
static char stub;
int launch(void) {
  dim3 one = {1, 1, 1};
  __cudaRegisterFunction(0, &stub, 0, "_Z3addPfS_", 0, 0, 0, 0, 0, 0);
  return cudaLaunchKernel(&stub, one, one, 0, 0, 0);
}
int begin(void) { const void* table; return cuGetExportTable(&table, &stub); }
"""
    )
    library = tmp_path / "extension.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(library), str(tmp_path / "extension.c")], check=True)
    program = f"import ctypes; e = ctypes.CDLL({str(library)!r}); print(e.launch(), e.begin() != 0, e.begin() != 0)"
    done = on_device([sys.executable, "-c", program], "null")
    assert done.stdout.split() == ["0", "True", "True"], done.stderr
    assert (
        done.stderr.count(f"{library} brings CUDA's runtime inside (cudart_static): its kernels cannot run here") == 1
    )


def test_the_device_is_of_the_kind_that_is_asked_for():
    program = (
        "import torch; p = torch.cuda.get_device_properties(0); print(p.name, p.major, p.minor, "
        "p.multi_processor_count, p.shared_memory_per_block_optin)"
    )
    kind = {
        "SHARDPLAN_DEVICE_NAME": "NVIDIA_A100", "SHARDPLAN_DEVICE_CAPABILITY": "8.0",
        "SHARDPLAN_DEVICE_MULTIPROCESSORS": "108",
    }
    assert on_device([sys.executable, "-c", program], "null", **kind).stdout.split() == [
        "NVIDIA_A100", "8", "0", "108", str(163 << 10),
    ]
    refused = on_device([sys.executable, "-c", program], "null", SHARDPLAN_DEVICE_CAPABILITY="ninety")
    assert (
        refused.returncode == 2 and "SHARDPLAN_DEVICE_CAPABILITY=ninety, expected two numbers, as 9.0" in refused.stderr
    )
