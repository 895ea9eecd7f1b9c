// SPDX-License-Identifier: Apache-2.0
#include "options.h"

#include <CLI/CLI.hpp>
#include <cstdio>
#include <map>
#include <sstream>

#include "shardplan/schemas/error.h"
#include "shardplan/schemas/io.h"
#include "shardplan/schemas/printable.h"

namespace shardplan::run {
namespace {

void AddFlags(CLI::App& app, RunOptions& options) {
  const CLI::Range count(std::int64_t{1}, std::int64_t{1} << 30);
  app.add_option("plan", options.plan_path, "The plan to replay, of training or of resharding")->required();
  app.add_option("--ranks", options.ranks, "Local processes to start (default: the plan's world size)")
      ->check(count);
  static const std::map<std::string, DeviceKind> kDevices = {
      {"cpu", DeviceKind::kCpu}, {"cuda", DeviceKind::kCuda}, {"virtual", DeviceKind::kVirtual}};
  app.add_option_function<std::string>(
         "--device", [&options](const std::string& name) { options.device = kDevices.at(name); },
         "cpu (Gloo), cuda (NCCL, a GPU per rank), or virtual (one thread, streams in the worst order)")
      ->transform(CLI::IsMember({"cpu", "cuda", "virtual"}, CLI::ignore_case))
      ->default_str("cpu")
      ->type_name("DEVICE");
  app.add_option("--steps", options.steps, "Steps to run; of resharding: how many times")
      ->check(count)
      ->capture_default_str();
  app.add_option("--compute-scale", options.compute_scale, "Filler compute takes the traced cost times this")
      ->check(CLI::Range(0.0, 1e9))
      ->capture_default_str();
  app.add_option("--timeout-s", options.timeout_s, "A collective that takes longer has failed")
      ->check(count)
      ->capture_default_str();
  app.add_option("--seed", options.seed, "virtual: which order the streams run in")->capture_default_str();
  app.add_option("--report", options.report_path, "Report of `shardplan simulate --report`, to compare with");
  app.add_option("--profile", options.profile_path,
                 "Write what was measured as a report, as `shardplan import-profile` does")
      ->type_name("FILE");
  app.add_flag("--arena", options.arena, "Buffers at addresses of their own in one block of memory");
  app.add_flag("!--no-activations", options.activations, "Do not allocate the model's own memory");
  app.add_flag("--progress", options.progress, "Each rank says when a step is done");
  app.add_flag("!--no-verify", options.verify, "Replay the plan as it is, even one that does not verify");
  app.footer(
      "Examples:\n"
      "  shardplan run plan.json --ranks 2 --device cpu --compute-scale 0.001\n"
      "  shardplan run plan.json --device virtual --seed 7\n"
      "  shardplan run reshard.json --device cpu                # bytes that are made up, each compared "
      "afterwards\n"
      "  torchrun --nproc-per-node 8 --no-python shardplan run plan.json --device cuda --report report.json\n"
      "Exit codes: 0 done, 1 the plan does not verify or the ranks have different ones, 2 usage (another "
      "number of\n"
      "ranks), 3 a bad document,\n"
      "4 environment (no GPU, a rank failed or did not arrive)");
}

}  // namespace

std::optional<int> ParseRun(int argc, const char* const* argv, RunOptions& options) {
  CLI::App app("Replay a plan without the model: real memory, real collectives, filler compute",
               "shardplan run");
  AddFlags(app, options);
  try {
    app.parse(argc, argv);
    return std::nullopt;
  } catch (const CLI::ParseError& error) {
    std::ostringstream text, wrong;
    const bool asked = app.exit(error, text, wrong) == 0;
    std::fputs(PrintableLines(wrong.str()).c_str(), stderr);
    if (!asked) return ExitCode(ErrorCode::kUsage);
    const Status written = WriteStandardOutput(text.str());
    if (written) return 0;
    std::fprintf(stderr, "shardplan-run: %s\n", ToString(written.error()).c_str());
    return ExitCode(written.error().code);
  }
}

}  // namespace shardplan::run
