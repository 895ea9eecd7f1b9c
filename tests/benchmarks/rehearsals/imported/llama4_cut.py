# SPDX-License-Identifier: Apache-2.0
"""torchtitan's Llama 4 of 16 experts cut to two layers, as torchao's benchmark has it. torchtitan imports it by
`--experimental.custom-import llama4_cut`."""

from torch.nn.attention import SDPBackend
from torchtitan.models.attention import ScaledDotProductAttentionWrapper
from torchtitan.models.llama4 import llama4_args

llama4_args["17bx16e"].n_layers = 2
# torchtitan asks for cuDNN first, which the device in software has not. A cluster has one rate for fused attention.
ScaledDotProductAttentionWrapper.sdpa_backends = [SDPBackend.FLASH_ATTENTION]
