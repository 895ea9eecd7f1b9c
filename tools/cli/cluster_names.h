// SPDX-License-Identifier: Apache-2.0
// Cluster documents by path, by the name of a shipped one, or by a device and a number of ranks.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "shardplan/schemas/cluster.h"
#include "shardplan/schemas/error.h"

namespace shardplan::cli {

// The names of the shipped documents, in order.
std::vector<std::string> ShippedClusters();

struct ClusterName {
  std::string path;
  // It names devices and no number of them ("h100"): the cluster has the ranks that are wanted.
  bool of_device = false;
};

// [Note: names of devices] Shipped documents are called FAMILY_RANKS: h100_sxm_8, h100_sxm_64, a100_80_8.
//
//   "h100_sxm_64"   that document
//   "h100_sxm"      the family's smallest document with `ranks` ranks or more, else its largest
//   "h100"          the same of the family that begins with these words and has the fewest (h100_sxm, not
//                   h100_96_500w)
//
// kBadInput: none, or several with equally many words; the error lists the names. `ranks` 0: any.
Result<ClusterName> ResolveCluster(const std::string& path_or_name, std::int64_t ranks);

// The document of that name, as it is: with its own number of ranks.
Result<Cluster> FindCluster(const std::string& path_or_name, std::int64_t ranks = 0);

}  // namespace shardplan::cli
