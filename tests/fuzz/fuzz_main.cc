// SPDX-License-Identifier: Apache-2.0
// Runs the fuzz targets without libFuzzer: good inputs, changed at random, as many as asked for.
//   fuzz_documents TARGET SEED ITERATIONS     TARGET: one of fuzz_targets.h
//   fuzz_documents TARGET FILE                one file, as a failure left it
//   fuzz_documents --targets                  their names, one a line
#include <sys/resource.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "shardplan/schemas/io.h"
#include "tests/fuzz/fuzz_seeds.h"
#include "tests/fuzz/fuzz_targets.h"
#include "tests/fuzz/mutator.h"

namespace shardplan::test {
namespace {

// An input that needs more than this is a failure, too: the process ends.
constexpr unsigned kMostSeconds = 60;
constexpr rlim_t kMostMemory = rlim_t{8} << 30;

void LimitMemory() {
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // they reserve more than there is
  const rlimit limit{kMostMemory, kMostMemory};
  setrlimit(RLIMIT_AS, &limit);
#endif
}

int Run(const FuzzTarget& target, std::uint64_t seed, long iterations) {
  const std::vector<std::string> seeds = FuzzSeeds(target.name);
  Mutator mutator(seeds, seed, target.name == "simulate" || target.name == "replay");
  const std::string file = "fuzz_" + std::string(target.name) + ".failed";
  const auto run = [&](const std::string& text) {
    // Kept while it is tried: after a crash the file has the input.
    if (std::FILE* out = std::fopen(file.c_str(), "wb")) {
      std::fwrite(text.data(), 1, text.size(), out);
      std::fclose(out);
    }
    alarm(kMostSeconds);
    target.run(text);
    alarm(0);
  };
  for (const std::string& text : seeds) run(text);
  for (long i = 0; i < iterations; ++i) run(mutator.Next());
  std::remove(file.c_str());
  std::printf("%s: %ld inputs of seed %llu\n", target.name.data(), iterations,
              static_cast<unsigned long long>(seed));
  return 0;
}

std::string TargetNames() {
  std::string names;
  for (const FuzzTarget& target : kFuzzTargets) {
    if (!names.empty()) names += '|';
    names += target.name;
  }
  return names;
}

}  // namespace
}  // namespace shardplan::test

int main(int argc, char** argv) {
  using namespace shardplan;
  test::LimitMemory();
  if (argc == 2 && argv[1] == std::string_view("--targets")) {
    for (const test::FuzzTarget& target : test::kFuzzTargets) std::printf("%s\n", target.name.data());
    return 0;
  }
  for (const test::FuzzTarget& target : test::kFuzzTargets) {
    if (argc < 3 || target.name != argv[1]) continue;
    if (argc == 4)
      return test::Run(target, std::strtoull(argv[2], nullptr, 10), std::strtol(argv[3], nullptr, 10));
    const Result<std::string> bytes = ReadFile(argv[2]);
    if (!bytes.has_value()) break;
    target.run(*bytes);
    return 0;
  }
  std::fprintf(stderr, "usage: fuzz_documents %s (SEED ITERATIONS | FILE)\n       fuzz_documents --targets\n",
               test::TargetNames().c_str());
  return 2;
}
