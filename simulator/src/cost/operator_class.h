// SPDX-License-Identifier: Apache-2.0
// Classes of operators: what costs and reports tell apart by an operator's name.
#pragma once

#include <string_view>
#include <vector>

namespace shardplan {

// All classes: those that names are looked up in, in that order, then "elementwise" and "other".
const std::vector<std::string_view>& OperatorClasses();

// Index into OperatorClasses. Of the name without namespace and overload ("aten::mm.out", "aten.mm.out",
// "fla.chunk_fwd_o", "mm"): the first class that has the whole name, or a part of it. Other operators of ATen
// are "elementwise", those of other libraries "other". The table is
// tools/python/shardplan/import_profile/operator_classes.json, which the reader of profiles looks into, too.
std::size_t OperatorClassOf(std::string_view name);

// True for operators whose FLOPs run at the matrix rate: matrix products, convolutions, fused attention,
// kernels of several products (a recurrence in chunks), and their backwards.
bool IsMatmulOperator(std::string_view name);
// Fused attention, forward or backward.
bool IsAttentionOperator(std::string_view name);
// One product of two matrices or vectors: what a table by shape holds for.
bool IsMatrixProduct(std::string_view name);

}  // namespace shardplan
