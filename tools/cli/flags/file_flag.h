// SPDX-License-Identifier: Apache-2.0
// Arguments that name files.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

namespace shardplan::cli {

// A flag that names a file, or takes the place of one: an empty value is a usage error, not a flag that is
// not given.
template <typename Path>
CLI::Option* AddFile(CLI::App& command, const std::string& flag, Path& path, const std::string& words,
                     const std::string& kind = "FILE") {
  const auto is_there = [](const std::string& name) {
    return name.empty() ? std::string("names no file") : std::string();
  };
  return command.add_option(flag, path, words)->type_name(kind)->check(CLI::Validator(is_there, ""));
}

}  // namespace shardplan::cli
