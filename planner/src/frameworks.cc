// SPDX-License-Identifier: Apache-2.0
#include "shardplan/planner/planner.h"

namespace shardplan {

const CheckpointRule& TorchtitanSelectiveCheckpointing() {
  static const CheckpointRule kRule = {.early_stop = false,
                                       .save = {
                                           {"aten.mm", 2},
                                           {"aten.linear", 2},
                                           {"aten.addmm", 0},
                                           {"aten.bmm", 0},
                                           {"aten._scaled_mm", 0},
                                           {"aten.convolution", 0},
                                           {"aten.convolution_backward", 0},
                                           {"aten.upsample_bilinear2d", 0},
                                           {"aten._scaled_dot_product_flash_attention", 0},
                                           {"aten._scaled_dot_product_efficient_attention", 0},
                                           {"aten._scaled_dot_product_cudnn_attention", 0},
                                           {"aten._scaled_dot_product_attention_math", 0},
                                           {"aten._scaled_dot_product_fused_attention_overrideable", 0},
                                           {"aten._flash_attention_forward", 0},
                                           {"aten._efficient_attention_forward", 0},
                                           {"flex_attention", 0},
                                           {"inductor_compiled_code", 0},
                                           {"torch_attn._varlen_attn", 0},
                                           {"aten.max", 0},
                                           {"aten.topk", 0},
                                           {"_c10d_functional.reduce_scatter_tensor", 0},
                                           {"_c10d_functional.all_to_all_single", 0},
                                           {"deepep.dispatch", 0},
                                           {"deepep.combine", 0},
                                           {"hybridep.dispatch", 0},
                                           {"hybridep.combine", 0},
                                       }};
  return kRule;
}

}  // namespace shardplan
