// SPDX-License-Identifier: Apache-2.0
// Trains a character-level GPT by a plan, a process for each rank, without Python:
//
//   RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 gpt_cpp --plan plan.json --text text.txt &
//   RANK=1 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 gpt_cpp --plan plan.json --text text.txt
//
// or under any launcher that sets these variables, torchrun --no-python among them. It saves in the
// background; SIGTERM makes all ranks save and end. --resume goes on with the last checkpoint, on any number
// of ranks. Losses go to standard output, what people look at to standard error. Exit codes are those of
// shardplan's commands: 0 done, or ended by SIGTERM after a save; 1 no: the model left its plan, ranks or a
// checkpoint differ; 2 usage; 3 a document or a text that is wrong, or a plan of another model; 4 a rank that
// died or did not come, or a machine that cannot.
#include <ATen/Parallel.h>
#include <signal.h>
#include <torch/optim/adamw.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "gpt.h"
#include "shardplan/executor/backends.h"
#include "shardplan/executor/training.h"
#include "shardplan/schemas/io.h"
#include "text.h"
#include "torch/launch.h"

namespace {

using shardplan::ErrorCode;
using shardplan::executor::Training;
using Clock = std::chrono::steady_clock;

constexpr const char* kUsage =
    "usage: gpt_cpp --plan FILE --text FILE [--steps 100] [--batch 12] [--lr 0.003] [--checkpoints FOLDER]\n"
    "               [--save-every 20] [--resume] [--device cpu|cuda] [--timeout 60] [--planned-peak-bytes "
    "N]\n";

// Ends the program; the kind decides the exit code.
struct Failure {
  ErrorCode code;
  std::string text;
};

struct Options {
  std::string plan, text, checkpoints, device = "cpu";
  std::int64_t steps = 100;
  std::int64_t batch = 12;  // rows of a step, over all ranks
  std::int64_t save_every = 20;
  std::int64_t timeout = 60;  // seconds, for the slowest rank
  std::int64_t planned_peak_bytes = 0;
  double learning_rate = 3e-3;
  bool resume = false;
};

double NumberOf(const std::string& name, const std::string& text) {
  char* end = nullptr;
  const double number = std::strtod(text.c_str(), &end);
  if (text.empty() || *end != '\0' || number <= 0)
    throw Failure{ErrorCode::kUsage, name + ": a positive number is expected, found " + text};
  return number;
}

Options Parse(int argc, char** argv) {
  Options options;
  const std::map<std::string, std::string*> texts = {{"--plan", &options.plan},
                                                     {"--text", &options.text},
                                                     {"--checkpoints", &options.checkpoints},
                                                     {"--device", &options.device}};
  const std::map<std::string, std::int64_t*> numbers = {
      {"--steps", &options.steps},
      {"--batch", &options.batch},
      {"--save-every", &options.save_every},
      {"--timeout", &options.timeout},
      {"--planned-peak-bytes", &options.planned_peak_bytes}};
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    if (name == "--resume") {
      options.resume = true;
      continue;
    }
    const bool known = texts.contains(name) || numbers.contains(name) || name == "--lr";
    if (!known) throw Failure{ErrorCode::kUsage, "unknown option " + name + "\n" + kUsage};
    if (++i == argc) throw Failure{ErrorCode::kUsage, name + " needs a value"};
    if (texts.contains(name)) *texts.at(name) = argv[i];
    if (numbers.contains(name)) *numbers.at(name) = static_cast<std::int64_t>(NumberOf(name, argv[i]));
    if (name == "--lr") options.learning_rate = NumberOf(name, argv[i]);
  }
  if (options.plan.empty() || options.text.empty())
    throw Failure{ErrorCode::kUsage, std::string("--plan and --text are needed\n") + kUsage};
  if (options.device != "cpu" && options.device != "cuda")
    throw Failure{ErrorCode::kUsage, "--device: cpu or cuda, found " + options.device};
  if (options.resume && options.checkpoints.empty())
    throw Failure{ErrorCode::kUsage, "--resume needs --checkpoints"};
  return options;
}

gpt::Text ReadText(const std::string& path, std::int64_t context) {
  try {
    return {path, context};
  } catch (const std::invalid_argument& error) {
    throw Failure{ErrorCode::kBadInput, error.what()};
  }
}

volatile std::sig_atomic_t told_to_end = 0;

// Errors of shardplan's Status and Result become a Failure.
Failure Failed(const shardplan::Error& error) { return {error.code, ToString(error)}; }
void OrThrow(const shardplan::Status& status) {
  if (!status) throw Failed(status.error());
}

// The bar of a terminal, a line a save elsewhere.
class Progress {
 public:
  Progress(bool shows, std::int64_t steps) : bar_(shows && isatty(STDERR_FILENO) != 0), steps_(steps) {}
  ~Progress() {
    if (bar_) std::fputc('\n', stderr);
  }
  void Show(std::int64_t step, double loss, double tokens_per_second) const {
    if (!bar_) return;
    constexpr int kWidth = 30;
    const int filled = static_cast<int>(kWidth * step / std::max<std::int64_t>(1, steps_));
    std::fprintf(stderr, "\r[%s%s] step %lld of %lld  loss %.4f  %.0f tokens/s ",
                 std::string(filled, '#').c_str(), std::string(kWidth - filled, '.').c_str(),
                 static_cast<long long>(step), static_cast<long long>(steps_), loss, tokens_per_second);
  }

 private:
  bool bar_;
  std::int64_t steps_;
};

std::string CheckpointOf(const Options& options, std::int64_t step) {
  char name[32];
  std::snprintf(name, sizeof name, "step_%06lld", static_cast<long long>(step));
  return options.checkpoints + "/" + name;
}

// "": there is none. A folder has its name when it is whole.
std::string LastCheckpoint(const std::string& folder) {
  std::string last;
  if (!std::filesystem::is_directory(folder)) return last;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (entry.path().filename().string().starts_with("step_")) last = std::max(last, entry.path().string());
  }
  return last;
}

struct Job {
  Options options;
  shardplan::executor::RankEnvironment place;
};

std::unique_ptr<Training> MakeTraining(const Job& job, gpt::Gpt& model) {
  shardplan::Result<shardplan::Plan> plan = shardplan::ReadPlan(job.options.plan);
  if (!plan) throw Failed(plan.error());
  const bool on_gpus = job.options.device == "cuda";
  const int gpus = on_gpus ? shardplan::executor::CudaDeviceCount() : 0;
  // Ranks of one machine that share its GPUs: NCCL takes them for ranks of several hosts.
  if (const std::int64_t rank = job.place.local_rank; gpus > 0 && rank >= gpus) {
    (void)setenv("NCCL_HOSTID", ("gpt_cpp-" + std::to_string(rank)).c_str(), 0);
    (void)setenv("LOCAL_RANK", std::to_string(rank % gpus).c_str(), 1);
  }
  auto options = shardplan::executor::TrainingOptions::FromEnvironment(
      on_gpus ? c10::DeviceType::CUDA : c10::DeviceType::CPU, std::chrono::seconds(job.options.timeout));
  if (!options) throw Failed(options.error());
  auto training = Training::Create(model.ptr(), model->calls, std::move(*plan), std::move(*options));
  if (!training) throw Failed(training.error());
  return std::move(*training);
}

int Train(const Job& job) {
  const Options& options = job.options;
  if (options.batch % job.place.world_size != 0)
    throw Failure{ErrorCode::kUsage, "--batch is not a multiple of the number of ranks"};
  const std::int64_t rows = options.batch / job.place.world_size;
  const bool speaks = job.place.rank == 0;
  gpt::Config config;
  const gpt::Text text = ReadText(options.text, config.context);
  config.vocabulary = text.vocabulary;
  torch::manual_seed(0);  // every rank makes the same model
  gpt::Gpt model(config);
  std::int64_t parameters = 0;
  for (const at::Tensor& parameter : model->parameters()) parameters += parameter.numel();
  const std::unique_ptr<Training> training = MakeTraining(job, model);
  torch::optim::AdamW optimizer(training->parameters(), torch::optim::AdamWOptions(options.learning_rate));

  std::map<std::string, at::Tensor> counters = {{"step", at::zeros({}, at::kLong)}};
  std::int64_t step = 0;
  if (const std::string last = options.resume ? LastCheckpoint(options.checkpoints) : ""; !last.empty()) {
    OrThrow(training->Load(last, &optimizer, counters));
    step = counters["step"].item<std::int64_t>();
    if (speaks) std::fprintf(stderr, "goes on with %s\n", last.c_str());
  }
  if (speaks) {
    std::fprintf(stderr, "GPT of %lld parameters, %lld ranks on %s, by a plan of %s\n",
                 static_cast<long long>(parameters), static_cast<long long>(job.place.world_size),
                 options.device.c_str(), training->plan().policy.c_str());
  }
  const auto save = [&](bool in_background) {
    counters["step"].fill_(step);
    const std::string path = CheckpointOf(options, step);
    const shardplan::executor::SaveOptions replaces = {.replaces = true};
    OrThrow(in_background ? training->SaveInBackground(path, &optimizer, counters, replaces)
                          : training->Save(path, &optimizer, counters, replaces));
  };
  const Progress progress(speaks, options.steps);
  std::int64_t peak_bytes = 0, saved = -1;
  double seconds = 0;
  const std::int64_t first = step;
  while (step < options.steps) {
    const auto begin = Clock::now();
    training->TakeMemory();
    const auto [tokens, targets] = text.Batch(step, job.place.rank * rows, rows);
    const at::Tensor loss =
        gpt::Loss(model->calls(model, tokens.to(training->device())), targets.to(training->device()));
    loss.backward();
    training->Step(optimizer);
    optimizer.zero_grad();
    const double mean = training->MeanOverRanks(loss.item<double>());  // of all rows of the batch
    ++step;
    seconds += std::chrono::duration<double>(Clock::now() - begin).count();
    const std::int64_t peak = training->TakeMemory().peak_bytes;
    if (step - first > 2) peak_bytes = std::max(peak_bytes, peak);  // of steps like all others
    if (speaks) std::printf("step %lld loss %.9f\n", static_cast<long long>(step), mean);
    std::fflush(stdout);
    const double rate = static_cast<double>((step - first) * options.batch * config.context) / seconds;
    progress.Show(step, mean, rate);
    const bool ends = training->AnyRank(told_to_end != 0);
    if (!options.checkpoints.empty() && (ends || step == options.steps || step % options.save_every == 0)) {
      save(!ends && step < options.steps);
      saved = step;
    }
    if (ends) break;
  }
  OrThrow(training->Wait());
  if (!speaks) return 0;
  if (saved == step) std::fprintf(stderr, "\nsaved %s\n", CheckpointOf(options, step).c_str());
  if (step < options.steps)
    std::fprintf(stderr, "ended by a signal after step %lld\n", static_cast<long long>(step));
  std::fprintf(
      stderr, "%.0f tokens/s; memory: %lld bytes at the peak of a step",
      seconds > 0 ? static_cast<double>((step - first) * options.batch * config.context) / seconds : 0.0,
      static_cast<long long>(peak_bytes));
  if (options.planned_peak_bytes > 0) {
    std::fprintf(stderr, ", the plan says %lld (%+.2f %%)",
                 static_cast<long long>(options.planned_peak_bytes),
                 100.0 * static_cast<double>(peak_bytes - options.planned_peak_bytes) /
                     static_cast<double>(options.planned_peak_bytes));
  }
  std::fputc('\n', stderr);
  return 0;
}

// Why the rank ends, and with which exit code.
int Say(const Job& job, ErrorCode code, const std::string& text) {
  std::fprintf(stderr, "rank %lld: %s\n", static_cast<long long>(job.place.rank), text.c_str());
  return ExitCode(code);
}

}  // namespace

int main(int argc, char** argv) {
  Job job;
  try {
    job.options = Parse(argc, argv);
    const auto place = shardplan::executor::ReadRankEnvironment();
    if (!place) throw Failed(place.error());
    job.place = place->value_or(shardplan::executor::RankEnvironment());
    at::set_num_threads(1);
    struct sigaction action = {};
    action.sa_handler = [](int) { told_to_end = 1; };
    (void)sigaction(SIGTERM, &action, nullptr);
    return Train(job);
  } catch (const Failure& failure) {
    return Say(job, failure.code, failure.text);
  } catch (const shardplan::executor::TrainingError& error) {
    return Say(job, error.code(), error.what());
  } catch (const c10::Error& error) {  // torch's own: memory that does not suffice, say
    return Say(job, ErrorCode::kEnvironment, error.what_without_backtrace());
  } catch (const std::exception& error) {
    return Say(job, ErrorCode::kInternal, error.what());
  }
}
