// SPDX-License-Identifier: Apache-2.0
#include "cluster_names.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <map>
#include <optional>
#include <utility>

#include "shardplan/schemas/io.h"
#include "support.h"

namespace shardplan::cli {
namespace {

namespace fs = std::filesystem;

std::vector<fs::path> Folders() { return DataFolders("clusters", "tools/clusters"); }

std::optional<std::string> ShippedPath(const std::string& name) {
  for (const fs::path& folder : Folders()) {
    const fs::path candidate = folder / (name + ".json");
    if (IsThere(candidate.string())) return candidate.string();
  }
  return std::nullopt;
}

// The names of a family's documents, by their ranks.
using Family = std::map<std::int64_t, std::string>;

// By name. Documents whose names end otherwise (h100_sxm_64_100g) are in none.
std::map<std::string, Family> Families() {
  std::map<std::string, Family> families;
  for (const std::string& name : ShippedClusters()) {
    const std::size_t line = name.rfind('_');
    if (line == std::string::npos) continue;
    std::int64_t ranks = 0;
    const char* end = name.data() + name.size();
    const auto [read, error] = std::from_chars(name.data() + line + 1, end, ranks);
    if (error == std::errc{} && read == end) families[name.substr(0, line)][ranks] = name;
  }
  return families;
}

std::int64_t Words(const std::string& name) { return 1 + std::ranges::count(name, '_'); }

// The smallest of the families that begin with these words.
std::vector<std::string> Named(const std::map<std::string, Family>& families, const std::string& words) {
  std::vector<std::string> named;
  for (const auto& [name, family] : families) {
    if (name != words && !name.starts_with(words + "_")) continue;
    if (!named.empty() && Words(name) > Words(named.front())) continue;
    if (!named.empty() && Words(name) < Words(named.front())) named.clear();
    named.push_back(name);
  }
  return named;
}

}  // namespace

std::vector<std::string> ShippedClusters() {
  std::vector<std::string> names;
  for (const fs::path& folder : Folders()) {
    std::error_code ignored;
    for (const auto& entry : fs::directory_iterator(folder, ignored)) {
      if (entry.path().extension() == ".json") names.push_back(entry.path().stem().string());
    }
  }
  std::ranges::sort(names);
  names.erase(std::unique(names.begin(), names.end()), names.end());
  return names;
}

Result<ClusterName> ResolveCluster(const std::string& path_or_name, std::int64_t ranks) {
  if (IsThere(path_or_name)) return ClusterName{path_or_name};
  if (std::optional<std::string> path = ShippedPath(path_or_name)) return ClusterName{*std::move(path)};
  const std::map<std::string, Family> families = Families();
  const std::vector<std::string> named = Named(families, path_or_name);
  if (named.size() == 1) {
    const Family& family = families.at(named.front());
    const auto enough = family.lower_bound(ranks);
    const std::string& name = enough == family.end() ? family.rbegin()->second : enough->second;
    return ClusterName{.path = ShippedPath(name).value_or(name), .of_device = true};
  }
  Error error{.code = ErrorCode::kBadInput, .file = path_or_name};
  if (named.size() > 1) {
    error.message = "several families of shipped clusters begin with this name";
    error.expected = fmt::format("one of: {}", fmt::join(named, ", "));
    return std::unexpected(std::move(error));
  }
  std::vector<std::string> devices;
  for (const auto& [name, family] : families) devices.push_back(name);
  error.message = "no such cluster file, nor a shipped cluster of that name";
  error.expected =
      fmt::format("a path, one of: {}; or a device, whose cluster has the ranks that are wanted: {}",
                  fmt::join(ShippedClusters(), ", "), fmt::join(devices, ", "));
  return std::unexpected(std::move(error));
}

Result<Cluster> FindCluster(const std::string& path_or_name, std::int64_t ranks) {
  const Result<ClusterName> name = ResolveCluster(path_or_name, ranks);
  return name ? ReadCluster(name->path) : std::unexpected(name.error());
}

}  // namespace shardplan::cli
